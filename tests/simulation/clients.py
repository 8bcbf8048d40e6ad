"""The clients of a simulated world, and what each checks of what it receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draft_service.request import derive_seed
from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from tests.simulation.models import VOCABULARY, Oracle, require, target_token


@dataclass
class ClientPlan:
    """One request, and how its client behaves."""

    at: float
    message: draft_service_pb2.GenerateRequest
    timeout: float | None = None
    cancel_after: float | None = None
    reads_slowly: float = 0.0  # seconds a response

    @property
    def name(self) -> str:
        return self.message.request_id

    def seed(self, index: int) -> int:
        return derive_seed(self.message.sampling.seed, index)


class Letters:
    """A letter a token."""

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in ids if token < VOCABULARY)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        return self.decode([token])


class Received:
    """What one client received, checked as it comes."""

    def __init__(self, plan: ClientPlan, oracle: Oracle) -> None:
        self._plan = plan
        self._oracle = oracle
        self._ids: list[list[int]] = [[] for _ in range(plan.message.n)]
        self._texts = [""] * plan.message.n
        self._finished: dict[int, draft_service_pb2.GenerateFinished] = {}

    @property
    def summary(self) -> str:
        return " ".join(f"{len(ids)}/{self._plan.message.max_new_tokens}" for ids in self._ids)

    def take(self, response: draft_service_pb2.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "chunk":
                chunk, index = response.chunk, response.chunk.index
                name = f"{self._plan.name}/{index}"
                require(index not in self._finished, f"{name} received more after its end")
                self._ids[index] += chunk.token_ids
                self._texts[index] += chunk.text
                self._oracle.check_received(self._plan.seed(index), self._ids[index], name)
                text = self._right_text(index)
                require(
                    text.startswith(self._texts[index]), f"{name} received {self._texts[index]!r}; verified is {text!r}"
                )
            case "finished":
                self._finished[response.finished.index] = response.finished

    def _right_text(self, index: int) -> str:
        text = self._oracle.texts[self._plan.seed(index)]
        whole = Letters().decode([token for token in text.right if token not in text.stops])
        return whole[: min((at for stop in self._plan.message.stop if (at := whole.find(stop)) >= 0), default=None)]

    def check_whole(self) -> None:
        """The call ended well: each text is whole, and the right one."""
        for index, ids in enumerate(self._ids):
            text, name = self._oracle.texts[self._plan.seed(index)], f"{self._plan.name}/{index}"
            require(index in self._finished, f"{name} has no end, and its call ended well")
            right = self._right_text(index)
            require(self._texts[index] == right, f"{name} ends with {self._texts[index]!r}; right is {right!r}")
            if self._finished[index].finish_reason != sampling_pb2.FINISH_REASON_STOP_STRING:
                require(text.is_whole and ids == text.right, f"{name} ends with {ids}; right is {text.right}")
            if not text.draws:
                prefix = list(text.prompt)
                for token in text.tokens[len(prefix) :]:
                    require(
                        token == target_token(text.salt, prefix), f"{name}: {token} after {prefix} is not the target's"
                    )
                    prefix.append(token)
