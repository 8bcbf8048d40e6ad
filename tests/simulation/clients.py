"""The clients of a simulated world, and what each checks of what it is received."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from draft_service.request import derive_seed
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from tests.simulation.models import VOCABULARY, Oracle, require, target_token
from tests.simulation.network import EOF, Call


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

    def _seed(self, index: int) -> int:
        return derive_seed(self._plan.message.sampling.seed, index)

    def take(self, response: draft_service_pb2.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "chunk":
                chunk = response.chunk
                name = f"{self._plan.name}/{chunk.index}"
                require(chunk.index not in self._finished, f"{name} received more after its end")
                self._ids[chunk.index] += chunk.token_ids
                self._texts[chunk.index] += chunk.text
                self._oracle.check_received(self._seed(chunk.index), self._ids[chunk.index], name)
                text = self._right_text(chunk.index)
                require(
                    text.startswith(self._texts[chunk.index]),
                    f"{name} received {self._texts[chunk.index]!r}; verified is {text!r}",
                )
            case "finished":
                self._finished[response.finished.index] = response.finished

    def _right_text(self, index: int) -> str:
        text = self._oracle.texts[self._seed(index)]
        shown = [token for token in text.right if token not in text.stops]
        whole = Letters().decode(shown)
        cuts = [
            end - len(stop) for stop in self._plan.message.stop if (end := whole.find(stop) + len(stop)) >= len(stop)
        ]
        return whole[: min(cuts)] if cuts else whole

    def check_whole(self) -> None:
        """The call ended well: each text is whole, and the right one."""
        for index, ids in enumerate(self._ids):
            text, name = self._oracle.texts[self._seed(index)], f"{self._plan.name}/{index}"
            require(index in self._finished, f"{name} has no end, and its call ended well")
            finished = self._finished[index]
            right = self._right_text(index)
            require(self._texts[index] == right, f"{name} ends with {self._texts[index]!r}; right is {right!r}")
            if finished.finish_reason != sampling_pb2.FINISH_REASON_STOP_STRING:
                require(text.is_whole and ids == text.right, f"{name} ends with {ids}; right is {text.right}")
            if not text.draws:
                prefix = list(text.prompt)
                for token in text.tokens[len(prefix) :]:
                    require(
                        token == target_token(text.salt, prefix), f"{name}: {token} after {prefix} is not the target's"
                    )
                    prefix.append(token)


class Pipeliner:
    """A draft of another make: it has several proposals outstanding, on guesses of what the verdicts will be.

    Attributes:
        committed: the prompt, and what verdicts have committed.
    """

    def __init__(self, oracle: Oracle, chance: random.Random, seed: int, limit: int) -> None:
        self.committed = list(oracle.texts[seed].prompt)
        self._oracle = oracle
        self._chance = chance
        self._seed = seed
        self._prompt = len(self.committed)
        self._opening = verifier_service_pb2.OpenSequence(
            prompt_token_ids=self.committed,
            max_new_tokens=limit,
            sampling=sampling_pb2.SamplingParams(
                temperature=0.0, seed=seed, rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
            ),
        )
        self._outstanding: deque[tuple[int, list[int]]] = deque()  # rounds, each with the prefix it speaks of
        self._round = self._seen = 0

    async def run(self, call: Call, *, most_rounds: int) -> bool:
        """Writes its text, or as much of it as so many rounds come to; says whether its end was received."""
        await call.write(verifier_service_pb2.VerifyRequest(sequence_id="p", open=self._opening))
        guess, is_over = list(self.committed), False
        while not is_over or self._outstanding:
            while len(self._outstanding) < 3 and self._round < most_rounds and not is_over:
                await self._send(call, guess)
            if self._round >= most_rounds:
                await call.done_writing()
            response = await call.read()
            if response is EOF:
                break
            if response.WhichOneof("kind") == "verdict" and self._take(response.verdict):
                is_over = is_over or bool(response.verdict.finish_reason)
                if guess[: len(self.committed)] != self.committed:
                    guess = list(self.committed)
        return is_over

    async def _send(self, call: Call, guess: list[int]) -> None:
        base = len(guess)
        digest = PrefixHash(guess).digest()
        for _ in range(self._chance.randint(1, 4)):  # the last of them is what it takes for the target's own token
            right = target_token(0, guess)
            guess.append(right if self._chance.random() < 0.8 else (right + 1) % VOCABULARY)
        self._round += 1
        self._outstanding.append((self._round, guess[:base]))
        drafted = guess[base:-1]
        proposal = speculation_pb2.Proposal(
            round=self._round,
            base_length=base,
            prefix_hash=digest,
            token_ids=drafted,
            distributions=[speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass()) for _ in drafted],
            seen_round=self._seen,
        )
        await call.write(verifier_service_pb2.VerifyRequest(sequence_id="p", proposal=proposal))

    def _take(self, verdict: speculation_pb2.Verdict) -> bool:
        """Takes in a verdict; False where it was stale."""
        number, prefix = self._outstanding.popleft()
        require(verdict.round == number, f"round {verdict.round} is answered in the place of {number}")
        self._seen = verdict.round
        if verdict.status == speculation_pb2.VERDICT_STATUS_STALE:
            return False
        require(
            prefix == self.committed and verdict.base_length == len(prefix),
            f"a round on {prefix} was verified at {verdict.base_length}, after {self.committed}",
        )
        self.committed += verdict.token_ids
        self._oracle.check_received(self._seed, self.committed[self._prompt :], "the pipeliner")
        return True
