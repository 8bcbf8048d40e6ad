"""The decode loop: samples several tokens in a row for each of a few sequences, in one call.

Over a paged pool the steps are CUDA graphs (`outrider.runtime.captured_steps`). On a CPU the whole loop is in C
(`kernels.cpu_decode_loop`), where our decoder in C or llama.cpp runs the model. Otherwise the steps run eagerly. A
draft's tokens are sampled between them by `kernels.sampling`; a target's are drawn as verification draws them, to the
bit: by `kernels.verify`, without drafts, or in C if that verifies in C.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, RowAdjustment, apply
from kernels.cpu_decode_loop import LoopArrays
from kernels.sampling import Draw, Sample, sample
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Uniforms, implementation_for, verify
from outrider.runtime.batch import Chunk, last_rows
from outrider.runtime.captured_steps import CapturedSteps, StepSizes, without_mask
from outrider.runtime.cuda_graph import Capturer, EagerRunner, GraphRunner
from outrider.runtime.model_runner import ModelRunner


class Interrupt:
    """Ends a running decode loop after its current token. Any thread may call it."""

    def __init__(self) -> None:
        self.flag = np.zeros(1, np.int32)

    def set(self) -> None:
        self.flag[0] = 1

    def clear(self) -> None:
        self.flag[0] = 0


class DecodeLoop:
    """The decode loop of one model.

    Args:
        vocab_size: tokens that may be sampled; the model's logits may have more.
        config: how q is truncated; None, for a target, draws from p itself.
        verify_path: a target's implementation of `kernels.verify`; None is the fastest on the device.

    Attributes:
        interrupt: ends each call after one token while it is set, or two with captured steps.
    """

    def __init__(
        self, model_runner: ModelRunner, vocab_size: int, config: SparseConfig | None, verify_path: str | None = None
    ) -> None:
        self.model_runner = model_runner
        self._verify_path = verify_path or implementation_for(model_runner.loaded.device)
        self.vocab_size = vocab_size
        self.config = config
        self.interrupt = Interrupt()
        self._captured: CapturedSteps | None = None

    @property
    def _mask_token(self) -> int | None:
        """The draft's, which is never sampled."""
        return None if self.config is None else self.model_runner.loaded.mask_token

    def without_mask(self, logits: Tensor) -> Tensor:
        """The logits `[R, V]` of tokens that may be sampled, in place. Those of the mask token become -inf."""
        return without_mask(logits, self.vocab_size, self._mask_token)

    def obstacle(self, draws: Sequence[Sequence[Draw]], adjusters: Sequence[Adjuster | None] = ()) -> str | None:
        """Why `decode` does not support these draws; None if it does."""
        if self._captured is not None:
            return "changed logits" if any(adjusters) else self._captured.obstacle(draws)
        for own, adjuster in zip(draws, adjusters, strict=False):
            if adjuster is not None and not adjuster.is_counted(len(own)):
                return "the rules of `generate`, or stop tokens that are banned in some rows only"
        return None if self.model_runner.paged_runner is None else "no steps are captured for a paged KV cache"

    @torch.inference_mode()
    def decode(
        self,
        chunks: Sequence[Chunk],
        draws: Sequence[Sequence[Draw]],
        stops: Sequence[Collection[int]] | None = None,
        adjusters: Sequence[Adjuster | None] = (),
    ) -> list[list[Sample]]:
        """Runs a chunk of each sequence, samples its next token, runs that token, and so on. The last token is not run.

        Each sequence gets one token per draw, up to the first of its `stops`; fewer if the loop is interrupted. A
        target's loop ends for all sequences where one of them ends, so that the end of a text is not held up; with
        captured steps one token later.
        `adjusters` change the logits of their sequences; without any, none change. They are as before afterwards.
        A slot then holds its chunk and all sampled tokens but the last. If it raises, no slot has changed its
        length.

        Returns:
            The samples of each sequence. A sample without a token is the last of its sequence.

        Raises:
            ValueError: a chunk or its tokens do not fit their slot, a token is outside the vocabulary, or there is an
                `obstacle`.
            PoolExhausted: see `ModelRunner.forward`.
        """
        model_runner, pool = self.model_runner, self.model_runner.pool
        model_runner.check(chunks)
        for chunk, own in zip(chunks, draws, strict=True):
            rows = len(chunk.tokens) + len(own) - 1
            if chunk.start + rows > model_runner.max_length:
                limit = f"the limit is {model_runner.max_length}"
                raise ValueError(f"slot {chunk.slot} holds {chunk.start} positions and gets {rows} more; {limit}")
        if (why := self.obstacle(draws, adjusters)) is not None:
            raise ValueError(f"the decode loop of {model_runner.loaded.name} does not support {why}")
        stops, adjusters = stops or [()] * len(chunks), adjusters or [None] * len(chunks)
        if self._captured is not None:
            samples = self._captured.decode(chunks, draws, stops, self.interrupt.flag)
        elif (self.config is not None or self._verify_path == "c") and model_runner.has_loop_in_c(len(chunks)):
            loop = LoopArrays(
                draws, self.config, vocab_size=self.vocab_size, mask_token=self._mask_token, stops=stops,
                changes=[None if each is None else each.counted() for each in adjusters],
                interrupted=self.interrupt.flag,
            )  # fmt: skip
            samples = model_runner.run_loop(chunks, [len(own) - 1 for own in draws], loop)
        else:
            try:
                samples = self._step_by_step(chunks, draws, stops, adjusters)
            except Exception:
                for chunk in chunks:
                    pool.rollback(chunk.slot, chunk.start)
                raise
        samples = list(map(_to_stop, samples, stops))
        for chunk, own_samples in zip(chunks, samples, strict=True):
            pool.extend(chunk.slot, chunk.start + len(chunk.tokens) + len(own_samples) - 1)
        return samples

    def _step_by_step(
        self,
        chunks: Sequence[Chunk],
        draws: Sequence[Sequence[Draw]],
        stops: Sequence[Collection[int]],
        adjusters: Sequence[Adjuster | None],
    ) -> list[list[Sample]]:
        pool = self.model_runner.pool
        for chunk, own in zip(chunks, draws, strict=True):  # at once, so that its blocks can be consecutive
            pool.grow(chunk.slot, chunk.start + len(chunk.tokens) + len(own) - 1)
        samples: list[list[Sample]] = [[] for _ in chunks]
        active = list(range(len(chunks)))
        counting = [each and each.copy() for each in adjusters]
        batch = last_rows(chunks)
        while True:
            logits = self.model_runner.logits(batch)
            rows = [None if (each := counting[b]) is None else each.row() for b in active]
            drawn = self._drawn(self.without_mask(logits), [draws[b][len(samples[b])] for b in active], rows)
            for b, one in zip(active, drawn, strict=True):
                samples[b].append(one)
                if (adjuster := counting[b]) is not None:
                    adjuster.push(one.token)
            going = [
                i
                for i, b in enumerate(active)
                if drawn[i].token >= 0 and len(samples[b]) < len(draws[b]) and drawn[i].token not in stops[b]
            ]
            active = [active[i] for i in going]
            is_over = len(active) < len(chunks) if self.config is None else not active
            if is_over or self.interrupt.flag[0]:
                return samples
            slots = [batch[i].slot for i in going]
            batch = [Chunk(slot, [drawn[i].token], pool.length(slot), 0) for slot, i in zip(slots, going, strict=True)]

    def _drawn(self, logits: Tensor, draws: Sequence[Draw], rows: Sequence[RowAdjustment | None]) -> list[Sample]:
        rows = [row and row.within(logits.size(1)) for row in rows]  # a target may know more tokens than its draft
        if self.config is not None:
            return sample(apply(logits, rows), draws, self.config)
        proposals = list(map(_undrafted, draws, rows))
        return [Sample(each.next_token) for each in verify(logits, proposals, self._verify_path)]

    def capture(
        self, capturer: Capturer, *, sequences: int, tokens: int, with_kernels: bool, seconds: float, most_bytes: int
    ) -> str:
        """Captures the steps, if the pool is paged.

        Args:
            sequences, tokens: see `StepSizes`.
            with_kernels: whether the kernels of verification, which the steps need, run on the device.
            seconds, most_bytes: see `GraphRunner.capture`.

        Returns:
            One line for the log.
        """
        model_runner = self.model_runner
        runner = model_runner.paged_runner
        eager = runner.eager if isinstance(runner, GraphRunner) else runner
        if not isinstance(eager, EagerRunner):
            return "none: the KV cache is not paged"
        if not with_kernels:
            return "none: the Triton kernels of verification do not draw the tokens"
        size = StepSizes(sequences=sequences, tokens=tokens, vocab_size=self.vocab_size, mask_token=self._mask_token)
        self._captured = CapturedSteps(model_runner, eager, size, self.config)
        return self._captured.capture(capturer, seconds=seconds, most_bytes=most_bytes)


def _undrafted(draw: Draw, row: RowAdjustment | None) -> Proposed:
    """The proposal without drafts whose next token is this draw."""
    adjustments = () if row is None else (row,)
    if draw.noise is None:
        uniforms = Uniforms((), draw.uniform)
        return Proposed((), (), draw.params, 0, 0, uniforms=uniforms, adjustments=adjustments)
    seed, position = draw.noise
    return Proposed((), (), draw.params, seed, position, rule=Rule.COUPLED, adjustments=adjustments)


def _to_stop(samples: list[Sample], stops: Collection[int]) -> list[Sample]:
    """The samples up to the first of `stops`."""
    end = next((i + 1 for i, each in enumerate(samples) if each.token in stops), len(samples)) if stops else None
    return samples[:end]
