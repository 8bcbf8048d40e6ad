"""Runs the target's forward pass and the verification of a step. The host waits for the device once, for the results.

While a GPU runs the forward pass, the host accounts for the step before, packs the proposals, and queues the
verification. This holds with and without CUDA graphs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.logprobs import SCORED_ROWS, prompt_logprobs
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, TokenLogprobs, VerifyResult, verify
from outrider.runtime.cuda_graph import Capturer
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.service.sampling import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class Scoring:
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
        proposals: the judged proposals.
        results: one for each proposal, in order.
        scores: one for each scoring, in order: log-probabilities of its tokens; None if a row of logits is bad.
        forward_seconds: of the forward pass, of encoders, and of scoring.
        verify_seconds: of the verification and the transfer of its results.
    """

    proposals: Sequence[Proposed]
    results: list[VerifyResult]
    scores: list[tuple[TokenLogprobs, ...] | None]
    forward_seconds: float
    verify_seconds: float


class TargetRunner:
    """Runs steps of one target.

    Args:
        model_runner: the target.
        vocab_size: columns of the logits beyond it are padding.
        verify_path: an implementation of `kernels.verify`; None is the fastest on the device.
    """

    def __init__(self, model_runner: ModelRunner, *, vocab_size: int, verify_path: str | None = None) -> None:
        self._model_runner = model_runner
        self._vocab_size = vocab_size
        self._verify_path = verify_path

    @torch.inference_mode()
    def __call__(
        self,
        chunks: Sequence[Chunk],
        proposals: Sequence[Proposed],
        encoder_inputs: Sequence[tuple[int, Tensor]] = (),
        scorings: Sequence[Scoring] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Runs the chunks in one forward pass, judges the proposals, and scores tokens of prompts.

        Proposals take the first rows of logits, and scorings those after them, both in order. `encoder_inputs` are
        slots whose encoder runs first, each with its input. `meanwhile` is called once the forward pass is queued: a
        GPU runs it then. If it raises, all slots keep their lengths.

        Raises:
            ValueError, PoolExhausted: see `ModelRunner.forward`.
        """
        try:
            return self._run(chunks, proposals, encoder_inputs, scorings, meanwhile)
        except Exception:
            for chunk in chunks:  # the forward pass may have lengthened them
                self._model_runner.pool.rollback(chunk.slot, chunk.start)
            raise

    def _run(
        self,
        chunks: Sequence[Chunk],
        proposals: Sequence[Proposed],
        encoder_inputs: Sequence[tuple[int, Tensor]],
        scorings: Sequence[Scoring],
        meanwhile: Callable[[], None],
    ) -> StepResult:
        clock = _clock(self._model_runner.loaded.device)
        for slot, inputs in encoder_inputs:
            self._model_runner.encode(slot, inputs)
        logits = self._model_runner.forward(chunks)[:, : self._vocab_size]
        clock.mark()
        meanwhile()
        clock.mark()
        row = len(logits) - sum(len(each.tokens) for each in scorings)
        results = verify(logits[:row], proposals, self._verify_path) if proposals else []
        clock.mark()
        scores = []
        for each in scorings:
            scores.append(prompt_logprobs(logits[row : row + len(each.tokens)], each.tokens, each.top))
            row += len(each.tokens)
        clock.mark()
        forward, _, verifying, scoring = clock.seconds()
        return StepResult(proposals, results, scores, forward + scoring, verifying)

    def capture(
        self,
        capturer: Capturer,
        *,
        max_sequences: int,
        max_gamma: int,
        max_batch_tokens: int,
        seconds: float,
        most_bytes: int,
    ) -> str:
        """Captures steps of rounds; see `ModelRunner.capture`."""
        return self._model_runner.capture(
            capturer,
            max_sequences=max_sequences,
            widest=max_gamma + 1,
            max_batch_tokens=max(max_batch_tokens, max_gamma + 1),
            seconds=seconds,
            most_bytes=most_bytes,
        )


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
