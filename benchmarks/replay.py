"""The drafts of a text once more, with the target's law at each: from `Propose` of a draft service, and from the target
in this process.

A seed draws the same drafts again after the same tokens, so what comes back is what the text's own rounds were judged
on.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import grpc
import torch
from transformers import DynamicCache

from benchmarks.acceptance import Drafted
from benchmarks.local import load
from kernels.sampling import SamplingParams, probabilities
from outrider.client.events import AcceptanceRule
from outrider.service.wire import decode_sparse
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Written:
    """A text and its rounds.

    Attributes:
        prompt: its tokens.
        seed: of its draws.
        rule: what its proposals were judged by.
        output: the tokens written.
        bases: output tokens before each round, `[rounds]`.
        drafted: what was drafted in each, `[rounds]`.
        accepted: how much of it was accepted, `[rounds]`.
    """

    prompt: tuple[int, ...]
    seed: int
    rule: AcceptanceRule
    output: tuple[int, ...]
    bases: tuple[int, ...]
    drafted: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]


class Target:
    """The target's law after the tokens of one text, in float32; the text only grows."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._model: Any = load(folder, "float32").model
        self._vocab_size = vocab_size
        self._cache: Any = None
        self._committed = 0  # tokens of the text in the cache; what comes after them was drafted

    def begin(self) -> None:
        """Another text."""
        self._cache = DynamicCache(config=self._model.config)
        self._committed = 0

    def laws(self, tokens: Sequence[int], drafted: Sequence[int], temperature: float) -> torch.Tensor:
        """Law p after `tokens` and after each of `drafted` but the last, `[γ, V]`."""
        known = min(self._committed, len(tokens) - 1)
        if surplus := self._cache.get_seq_length() - known:  # drafts of the round before
            self._cache.crop(-surplus)
        self._committed = len(tokens)
        new = [*tokens[known:], *drafted[:-1]]
        with torch.inference_mode():
            logits = self._model(torch.tensor([new]), past_key_values=self._cache, use_cache=True).logits
        rows = logits[0, -len(drafted) :, : self._vocab_size]
        return probabilities(rows, SamplingParams(temperature=temperature))


class Replay:
    """Redrafts texts. A context manager: it holds a channel."""

    def __init__(self, address: str, target: Target) -> None:
        self._channel = grpc.insecure_channel(address)
        self._target = target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def rounds(self, text: Written, *, temperature: float, gamma: int) -> Iterator[tuple[list[int], list[Drafted]]]:
        """The tokens drafted in each round of the text, and their laws."""
        self._target.begin()
        with _Stream(self._channel, text, temperature) as stream:
            for base in text.bases:
                proposal = stream.propose(base, gamma)
                tokens = list(proposal.token_ids)
                laws = self._target.laws([*text.prompt, *text.output[:base]], tokens, temperature)
                yield tokens, [_drafted(*each) for each in zip(tokens, laws, proposal.distributions, strict=True)]


def _drafted(token: int, p: torch.Tensor, law: speculation_pb2.TokenDistribution) -> Drafted:
    ids, weights = decode_sparse(law.sparse)
    q = weights / weights.sum(dtype=float)
    masses = p.numpy()[ids].astype(float)
    at = int(ids.searchsorted(token))
    return Drafted(p=float(masses[at]), q=float(q[at]), masses=masses, weights=q)


class _Stream:
    """One call of `Propose`, which follows one text."""

    def __init__(self, channel: grpc.Channel, text: Written, temperature: float) -> None:
        self._text = text
        self._told = 0  # output tokens the draft knows
        self._round = 0
        self._outbox: queue.SimpleQueue[draft_service_pb2.ProposeRequest | None] = queue.SimpleQueue()
        self._send(
            open=draft_service_pb2.OpenDraft(
                prompt_token_ids=text.prompt,
                sampling=sampling_pb2.SamplingParams(
                    temperature=temperature,
                    seed=text.seed,
                    rule=cast("sampling_pb2.AcceptanceRule", text.rule.number),
                ),
            )
        )
        self._call = DraftServiceStub(channel).Propose(iter(self._outbox.get, None), timeout=_TIMEOUT_S)
        next(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._outbox.put(None)
        for _ in self._call:  # to its end: the next text needs the place
            pass

    def propose(self, base: int, gamma: int) -> speculation_pb2.Proposal:
        """Tells the text up to `base` output tokens, and asks for a proposal there."""
        self._round += 1
        self._send(
            advance=draft_service_pb2.Advance(
                round=self._round,
                base_length=len(self._text.prompt) + self._told,
                committed_token_ids=self._text.output[self._told : base],
                gamma=gamma,
            )
        )
        self._told = base
        proposal: speculation_pb2.Proposal = next(self._call).proposal
        return proposal

    def _send(self, **kind: Any) -> None:
        self._outbox.put(draft_service_pb2.ProposeRequest(sequence_id="replay", **kind))
