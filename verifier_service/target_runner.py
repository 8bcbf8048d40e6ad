"""Runs the target over a pass, and verifies the proposals in it. The host waits for the device once: for the results.

A GPU runs the pass while the host packs the proposals; the verification is queued behind it, whether the pass is a CUDA
graph or not.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import SamplingParams
from kernels.verify import Proposed, VerifyResult, verify
from outrider.runtime.cuda_graph import Capturer
from outrider.runtime.model_runner import Chunk, ModelRunner


@dataclass(frozen=True, slots=True)
class PassResult:
    """What came of a pass.

    Attributes:
        proposals: that were judged.
        results: one for each, in order.
        forward_seconds: of the model.
        verify_seconds: of the verification, and of fetching what it found.
    """

    proposals: Sequence[Proposed]
    results: list[VerifyResult]
    forward_seconds: float
    verify_seconds: float


class TargetRunner:
    """One target's.

    Args:
        model_runner: the target.
        vocab_size: tokens that may be written; columns beyond them are padding.
        verify_path: an implementation of `kernels.verify`; None is the fastest on the device.
    """

    def __init__(self, model_runner: ModelRunner, *, vocab_size: int, verify_path: str | None = None) -> None:
        self._model_runner = model_runner
        self._vocab_size = vocab_size
        self._verify_path = verify_path

    @torch.inference_mode()
    def __call__(self, chunks: Sequence[Chunk], proposals: Sequence[Proposed]) -> PassResult:
        """Runs the chunks in one pass, and judges the proposals by the rows that have logits, in order.

        If it raises, no slot has changed its length.

        Raises:
            ValueError, PoolExhausted: see `ModelRunner.forward`.
        """
        try:
            return self._run(chunks, proposals)
        except Exception:
            for chunk in chunks:  # where the verification failed, the pass has already lengthened them
                self._model_runner.pool.rollback(chunk.slot, chunk.start)
            raise

    def _run(self, chunks: Sequence[Chunk], proposals: Sequence[Proposed]) -> PassResult:
        clock = _clock(self._model_runner.loaded.device)
        logits = self._model_runner.forward(chunks)
        clock.mark()
        results = verify(logits[:, : self._vocab_size], proposals, self._verify_path) if proposals else []
        clock.mark()
        forward, verifying = clock.seconds()
        return PassResult(proposals, results, forward, verifying)

    def capture(
        self,
        capturer: Capturer,
        *,
        max_sequences: int,
        max_gamma: int,
        pass_tokens: int,
        seconds: float,
        most_bytes: int,
    ) -> str:
        """Has passes of rounds captured; see `ModelRunner.capture`."""
        return self._model_runner.capture(
            capturer,
            max_sequences=max_sequences,
            widest=max_gamma + 1,
            pass_tokens=max(pass_tokens, max_gamma + 1),
            seconds=seconds,
            most_bytes=most_bytes,
        )


def verify_rows(logits: Tensor, verify_path: str) -> None:
    """Judges each row of `[R, V]` by itself, and forgets it: for the memory it takes."""
    alone = Proposed(tokens=(), q=(), law=SamplingParams(), seed=0, base_length=1)
    verify(logits, [alone] * len(logits), verify_path)


class _HostClock:
    """Seconds between marks, where calls return when they are done."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]


class _CudaClock:
    """The same by the device's own time; the host waits in `seconds` alone."""

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
