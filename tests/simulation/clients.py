"""The clients of a simulated cluster. Each checks the responses that it receives."""

from dataclasses import dataclass
from typing import Any

from outrider.seeds import derive_seed
from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from tests.simulation.models import VOCABULARY, Reference, require, target_token


@dataclass
class ClientPlan:
    """One request, and the behaviour of its client."""

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
    """A tokenizer with a letter for each token."""

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in ids if token < VOCABULARY)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        return self.decode([token])


class Received:
    """The responses of one call, checked as they come."""

    def __init__(self, plan: ClientPlan, reference: Reference) -> None:
        self._plan = plan
        self._reference = reference
        self._ids: list[list[int]] = [[] for _ in range(plan.message.n)]
        self._texts = [""] * plan.message.n
        self._finished: dict[int, draft_service_pb2.GenerateFinished] = {}

    @property
    def summary(self) -> str:
        return " ".join(f"{len(ids)}/{self._plan.message.max_new_tokens}" for ids in self._ids)

    def add(self, response: draft_service_pb2.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "chunk":
                chunk, index = response.chunk, response.chunk.index
                name = f"{self._plan.name}/{index}"
                require(index not in self._finished, f"{name} received a chunk after its end")
                self._ids[index] += chunk.token_ids
                self._texts[index] += chunk.text
                self._reference.check_received(self._plan.seed(index), self._ids[index], name)
                text, expected = self._texts[index], self._expected(index)
                require(expected.startswith(text), f"{name} received {text!r}; verified is {expected!r}")
            case "finished":
                self._finished[response.finished.index] = response.finished

    def _expected(self, index: int) -> str:
        text = self._reference.texts[self._plan.seed(index)]
        whole = Letters().decode([token for token in text.output if token not in text.stops])
        return whole[: min((at for stop in self._plan.message.stop if (at := whole.find(stop)) >= 0), default=None)]

    def check_whole(self) -> None:
        """Check that each sample is complete, after a call without error."""
        for index, ids in enumerate(self._ids):
            text, name = self._reference.texts[self._plan.seed(index)], f"{self._plan.name}/{index}"
            require(index in self._finished, f"{name} has no end, and its call has no error")
            expected = self._expected(index)
            require(self._texts[index] == expected, f"{name} is {self._texts[index]!r}; expected is {expected!r}")
            if self._finished[index].finish_reason != sampling_pb2.FINISH_REASON_STOP_STRING:
                require(text.is_whole and ids == text.output, f"{name} has tokens {ids}; expected are {text.output}")
            if not text.draws:
                for at in range(len(text.prompt), len(text.tokens)):
                    prefix, token = text.tokens[:at], text.tokens[at]
                    is_right = token == target_token(text.salt, prefix)
                    require(is_right, f"{name}: {token} after {prefix} is not the target's")
