"""Runs the target's forward pass and the verification of a step. The host waits for the device once, for the results.

While a GPU runs the forward pass, the host accounts for the step before, packs the proposals, and queues the
verification. This holds with and without CUDA graphs.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.adjustments import Adjuster
from kernels.logprobs import SCORED_ROWS, prompt_logprobs
from kernels.rng import Domain, uniform
from kernels.sampling import Draw, SamplingParams
from kernels.verify import BAD_LOGITS, Proposed, Rule, Status, TokenLogprobs, VerifyResult, verify
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.service.sampling import MAX_TOP_LOGPROBS

# The most tokens of each sequence in one call of the decode loop. A new request ends the call.
MAX_DECODE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of a prompt whose log-probabilities are wanted.

    Attributes:
        tokens: one for each row of logits of a chunk.
        top: how many of the most probable tokens to add.
    """

    tokens: Sequence[int]
    top: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step.

    Attributes:
        results: one for each proposal, in order.
        earlier: of each proposal, tokens that `decode` drew before the one in its result; empty after other steps.
        scores: one for each of the scored, in order: log-probabilities of its tokens; None if a row of logits is bad.
        forward_seconds: of the forward passes, of encoders, and of scoring; after `decode` also of sampling.
        verify_seconds: of the verification and the transfer of its results.
    """

    results: list[VerifyResult]
    scores: list[tuple[TokenLogprobs, ...] | None]
    forward_seconds: float
    verify_seconds: float
    earlier: Sequence[Sequence[int]] = ()
    passes: int = 1


class TargetRunner:
    """Runs steps of one target.

    Args:
        vocab_size: columns of the logits beyond it are padding.
        verify_path: an implementation of `kernels.verify`; None is the fastest on the device.

    Attributes:
        interrupt: ends `decode` early.
    """

    def __init__(self, model_runner: ModelRunner, *, vocab_size: int, verify_path: str | None = None) -> None:
        self._model_runner = model_runner
        self._vocab_size = vocab_size
        self._verify_path = verify_path
        self.loop = DecodeLoop(model_runner, vocab_size, None, verify_path)
        self.interrupt = self.loop.interrupt

    @torch.inference_mode()
    def __call__(
        self,
        chunks: Sequence[Chunk],
        proposals: Sequence[Proposed],
        encoder_inputs: Sequence[tuple[int, Tensor]] = (),
        scored: Sequence[ScoredTokens] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Runs the chunks in one forward pass, judges the proposals, and scores tokens of prompts.

        Proposals take the first rows of logits, and scored tokens those after them, both in order. `encoder_inputs` are
        slots whose encoder runs first, each with its input. `meanwhile` is called while a GPU runs the forward pass.
        If the call raises, all slots keep their lengths.

        Raises:
            ValueError, PoolExhausted: see `ModelRunner.forward`.
        """
        clock = _clock(self._model_runner.loaded.device)
        try:
            for slot, inputs in encoder_inputs:
                self._model_runner.encode(slot, inputs)
            logits = self._model_runner.forward(chunks)[:, : self._vocab_size]
            clock.mark()
            meanwhile()
            clock.mark()
            row = len(logits) - sum(len(each.tokens) for each in scored)
            results = verify(logits[:row], proposals, self._verify_path) if proposals else []
            clock.mark()
            scores = []
            for each in scored:
                scores.append(prompt_logprobs(logits[row : row + len(each.tokens)], each.tokens, each.top))
                row += len(each.tokens)
            clock.mark()
            forward, _, verifying, scoring = clock.seconds()
        except Exception:
            for chunk in chunks:  # the forward pass may have lengthened them
                self._model_runner.pool.rollback(chunk.slot, chunk.start)
            raise
        return StepResult(results, scores, forward + scoring, verifying)

    def max_decode_tokens(self, pass_seconds: float, seconds: float) -> int:
        """The most tokens that `decode` may draw for a sequence in `seconds`, where a pass takes `pass_seconds`."""
        return max(0, min(MAX_DECODE_TOKENS, int(seconds / max(pass_seconds, 1e-9))))

    def decode(
        self,
        chunks: Sequence[Chunk],
        proposals: Sequence[Proposed],
        counts: Sequence[int],
        stops: Sequence[Collection[int]],
        adjusters: Sequence[Adjuster | None] = (),
    ) -> StepResult | None:
        """Draws several tokens in a row for each chunk, with the draws of single steps. `interrupt` ends it early.

        Args:
            proposals: of each chunk, without drafts and log-probabilities; their adjustments are not read.
            counts: of each chunk, tokens to draw, `max_decode_tokens` at most.
            stops: of each chunk, tokens after which nothing is drawn.
            adjusters: of each chunk, or empty: see `DecodeLoop.decode`.

        Returns:
            The results; None if the decode loop cannot draw them.

        Raises:
            ValueError, PoolExhausted: see `DecodeLoop.decode`.
        """
        draws = [_draws(proposal, count) for proposal, count in zip(proposals, counts, strict=True)]
        if self.loop.obstacle(draws, adjusters) is not None:
            return None
        started = time.perf_counter()
        drawn = [[each.token for each in own] for own in self.loop.decode(chunks, draws, stops, adjusters)]
        seconds = time.perf_counter() - started
        results, earlier = list[VerifyResult](), list[list[int]]()
        for *before, last in drawn:
            if last < 0 and before:  # the next step finds the bad logits again
                *before, last = before
            results.append(VerifyResult(Status.OK, 0, last) if last >= 0 else BAD_LOGITS)
            earlier.append(before)
        return StepResult(results, [], seconds, 0.0, earlier, passes=max(map(len, drawn)))


def _draws(proposal: Proposed, count: int) -> list[Draw]:
    """The draws of the next tokens: the base of each is the length of the text before it."""
    params, positions = proposal.params, range(proposal.base_length, proposal.base_length + count)
    if params.is_greedy:
        return [Draw(params)] * count
    if proposal.rule is Rule.COUPLED:
        return [Draw(params, noise=(proposal.seed, position)) for position in positions]
    return [Draw(params, uniform(proposal.seed, position, 0, Domain.RESAMPLE)) for position in positions]


def verify_rows(logits: Tensor, verify_path: str) -> None:
    """Verifies each row of `[R, V]` without drafts, and scores some. For the profiling run, which measures memory."""
    alone = Proposed(tokens=(), q=(), params=SamplingParams(), seed=0, base_length=1)
    verify(logits, [alone] * len(logits), verify_path)
    prompt_logprobs(logits, [0] * min(len(logits), SCORED_ROWS), MAX_TOP_LOGPROBS)


class _HostClock:
    """Seconds between marks, where calls return when their work is done."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]


class _CudaClock:
    """The same with the device's clock; only `seconds` waits for the device."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]


def _clock(device: torch.device) -> _HostClock | _CudaClock:
    return _CudaClock() if device.type == "cuda" else _HostClock()
