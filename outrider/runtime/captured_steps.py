"""The steps of the decode loop over a paged KV cache, as CUDA graphs.

A step samples a token of each sequence on the device and runs it. It is captured once per number of sequences. The host
queues a step while the one before runs, so the device does not wait for it. And it reads each token: a loop ends where
a text ends, or where it is interrupted. The kernels of verification draw a target's tokens, so they are those of single
steps.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.attention_work import ITEM, work_list, work_size
from kernels.packed_arrays import Field, PackedArrays
from kernels.sampling import NO_LOGITS, Draw, Sample
from kernels.sparse import SparseConfig, SparseDistribution
from kernels.verify_pack import FLOATS, INTS, numbers_of_draw
from outrider.runtime.batch import Chunk, PagedBatch, build_batch
from outrider.runtime.cuda_graph import CannotCapture, Capturer, EagerRunner
from outrider.runtime.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The limits of captured steps.

    Attributes:
        sequences: the most sequences of one call.
        tokens: the most tokens of each, γ.
        vocab_size: tokens that may be sampled.
        mask_token: is never sampled; None if the model has none.
    """

    sequences: int
    tokens: int
    vocab_size: int
    mask_token: int | None = None


def without_mask(logits: Tensor, vocab_size: int, mask_token: int | None) -> Tensor:
    """The logits `[…, V]` of tokens that may be sampled, in place. Those of the mask token become -inf."""
    z = logits[..., :vocab_size]
    if mask_token is not None and mask_token < vocab_size:
        z[..., mask_token] = -math.inf
    return z


class CapturedSteps:
    """Captured steps for 1, 2, 4 … sequences."""

    def __init__(
        self, model_runner: ModelRunner, eager: EagerRunner, size: StepSizes, config: SparseConfig | None
    ) -> None:
        self._model_runner = model_runner
        self._eager = eager
        self._size = size
        self._config = config
        self._buffers: list[_StepBuffers] = []  # the smallest first
        # [γ, S, V]: the logits of each token of a draft, of the last one of a target; all sizes share this buffer.
        rows = size.sequences * (1 if config is None else size.tokens)
        self._logits = torch.zeros(rows, model_runner.loaded.vocab_size, dtype=eager.dtype, device=eager.device)

    def obstacle(self, draws: Sequence[Sequence[Draw]]) -> str | None:
        """Why these draws are not supported; None if they are."""
        most = self._buffers[-1].sequences if self._buffers else 0
        if len(draws) > most:
            return f"{len(draws)} sequences; steps of {most} at most are captured"
        for own in draws:
            if len(own) > self._size.tokens:
                return f"{len(own)} tokens; {self._size.tokens} at most are captured"
            for each in own:
                is_filtered = not (each.params.is_greedy or each.params.has_no_filters)
                if is_filtered and (self._config is None or each.noise is not None):
                    return "top-k, top-p or min-p"
                if each.max_entropy != math.inf:
                    return "max_entropy"
        return None

    def decode(
        self,
        chunks: Sequence[Chunk],
        draws: Sequence[Sequence[Draw]],
        stops: Sequence[Collection[int]],
        interrupted: np.ndarray,
    ) -> list[list[Sample]]:
        """See `DecodeLoop.decode`; lengths of slots do not change. `interrupted[0]` is not 0 once the loop must end."""
        model_runner, pool = self._model_runner, self._model_runner.pool
        assert model_runner.paged_runner is not None
        for chunk, own in zip(chunks, draws, strict=True):
            pool.grow(chunk.slot, chunk.start + len(chunk.tokens) + len(own) - 1)
        last = [replace(chunk, logits_from=len(chunk.tokens) - 1) for chunk in chunks]
        logits = model_runner.paged_runner.run(build_batch(last, pool))
        buffers = next(each for each in self._buffers if each.sequences >= len(chunks))
        buffers.fill(chunks, [pool.block_table(chunk.slot) for chunk in chunks], logits, draws)
        drawn = buffers.run(draws, stops, interrupted)
        return buffers.fetch([own[:drawn] for own in draws])

    @torch.inference_mode()
    def capture(
        self, capturer: Capturer, *, seconds: float, most_bytes: int, clock: Callable[[], float] = time.perf_counter
    ) -> str:
        """Captures steps for 1, 2, 4 … sequences, the fewest first; see `GraphRunner.capture`.

        Returns:
            One line for the log.
        """
        counts = sorted({min(1 << i, self._size.sequences) for i in range(self._size.sequences.bit_length() + 1)})
        began, why = clock(), ""
        for count in counts:
            spent = clock() - began
            if spent * (len(self._buffers) + 1) > seconds * max(1, len(self._buffers)):
                why = f"capturing took {spent:.1f} s so far, and {seconds:g} s are allowed for all"
            elif capturer.bytes > most_bytes:
                why = f"the graphs hold {capturer.bytes >> 20} MiB of {most_bytes >> 20} MiB allowed"
            if why:
                break
            buffers = _StepBuffers(self._eager, self._size, self._config, count, self._logits)
            try:
                buffers.capture(capturer)
            except CannotCapture as error:
                why = str(error)
                break
            self._buffers.append(buffers)
        return f"steps of up to {self._buffers[-1].sequences if self._buffers else 0} sequences" + (
            f": {why}" if why else ""
        )


class _StepBuffers:
    """The tensors that steps of S sequences read and write, and the graphs of these steps."""

    def __init__(
        self, eager: EagerRunner, size: StepSizes, config: SparseConfig | None, sequences: int, logits: Tensor
    ) -> None:
        self.sequences = S = sequences
        self._eager, self._size, self._config = eager, size, config
        kept = 1 if config is None else size.tokens
        self._logits = logits[: kept * S].view(kept, S, -1)
        blocks = -(-eager.max_length // eager.memory.block_tokens)
        items, partials = work_size(S, eager.max_length + size.tokens)
        support = 0 if config is None else min(config.max_support, size.vocab_size)
        on_gpu = eager.device.type == "cuda"
        inputs = PackedArrays(
            {
                "positions": Field(np.int64, (S,)),
                "limits": Field(np.int64, (S,)),  # rows from these positions on are padding
                "step": Field(np.int64, (1,)),
                "ints": Field(np.int64, (S, INTS)),  # this and the next two: see `verify_pack.Batch`
                "floats": Field(np.float64, (S, FLOATS)),
                "uniforms": Field(np.float64, (size.tokens, S)),
                "untruncated": Field(np.int64, (S,)),  # 1: drawn by noise, or at temperature 0
                "block_tables": Field(np.int32, (S, blocks)),
                "items": Field(np.int32, (items, ITEM)),
                "row_partials": Field(np.int32, (S,)),
            }
        )
        self._staged = inputs.buffer(torch.device("cpu"), pinned=on_gpu)
        self._staged.zero_()
        self._host = inputs.arrays(self._staged)
        self._buffer = self._staged.to(eager.device)
        self._inputs = inputs.tensors(self._buffer)
        outputs = PackedArrays(
            {
                "tokens": Field(np.int64, (size.tokens, S)),
                "ids": Field(np.int64, (size.tokens, S, support)),
                "weights": Field(np.int32, (size.tokens, S, support)),
            }
        )
        self._results = outputs.buffer(eager.device)
        self._outputs = outputs.tensors(self._results)
        self._host_buffer = outputs.buffer(torch.device("cpu"), pinned=on_gpu)
        self._host_results = outputs.arrays(self._host_buffer)
        self._host_tokens = outputs.tensors(self._host_buffer)["tokens"]
        self._copied = torch.cuda.Event() if on_gpu else None  # the tokens of the last draw
        # What a draw adds to `ints`: positions of noise, and the index of the uniform.
        self._growth = torch.tensor([0, 0, 0, 0, 1, S], device=eager.device)
        self._batch = PagedBatch(
            tokens=torch.zeros(S, dtype=torch.int64, device=eager.device),
            positions=torch.zeros(S, dtype=torch.int64, device=eager.device),
            slot_mapping=torch.full((S,), eager.memory.null_position, dtype=torch.int64, device=eager.device),
            rows=torch.arange(S, device=eager.device),
            row_starts=torch.arange(S + 1, dtype=torch.int32, device=eager.device),
            lengths=torch.ones(S, dtype=torch.int32, device=eager.device),
            block_tables=self._inputs["block_tables"],
            items=self._inputs["items"],
            row_partials=self._inputs["row_partials"],
            partials=partials,
            memory=eager.memory,
            attention=eager.attention,
            logits=self._logits[0] if kept == 1 else None,
        )
        self._replay_draw: dict[Callable[[], None], Callable[[], None]] = {}
        self._replay_advance: Callable[[], None]

    def capture(self, capturer: Capturer) -> None:
        """Captures the two parts of a step: the draw, by each way, and the run of the tokens."""
        self._inputs["step"].zero_()
        draws = [self._draw_greedily, self._draw_untruncated]
        for draw in draws if self._config is None else [*draws, self._draw_truncated]:
            self._replay_draw[draw] = capturer.capture(draw)
        self._replay_advance = capturer.capture(self._advance)

    def fill(
        self,
        chunks: Sequence[Chunk],
        block_tables: Sequence[Sequence[int]],
        logits: Tensor,
        draws: Sequence[Sequence[Draw]],
    ) -> None:
        """Writes the inputs of the first step."""
        self._staged.zero_()
        host = self._host  # its arrays are views of the staged buffer
        for s, (chunk, blocks, own) in enumerate(zip(chunks, block_tables, draws, strict=True)):
            count, first = len(own), own[0]
            host["positions"][s] = chunk.start + len(chunk.tokens)
            host["limits"][s] = chunk.start + len(chunk.tokens) + count - 1
            host["ints"][s], host["floats"][s] = numbers_of_draw(first, s, s)
            host["uniforms"][:count, s] = [each.uniform for each in own]
            host["untruncated"][s] = first.noise is not None or first.params.is_greedy
            host["block_tables"][s, : len(blocks)] = blocks
        for s in range(len(chunks), self.sequences):
            host["ints"][s, 0] = s
        # Each sequence has one row, whose position grows by 1 per step.
        work = work_list(range(self.sequences + 1), (host["positions"] + 1).tolist(), growth=self._size.tokens - 1)
        host["items"][: len(work.items)], host["row_partials"][...] = work.items, work.row_partials
        self._buffer.copy_(self._staged, non_blocking=True)
        self._logits[0, : len(chunks)].copy_(logits)

    def run(self, draws: Sequence[Sequence[Draw]], stops: Sequence[Collection[int]], interrupted: np.ndarray) -> int:
        """Replays draws and steps in turn. Returns how many tokens a sequence has at most.

        A step is queued before the host reads the token that it runs.
        """
        replay_draw = self._replay_draw[self._draw_for(draws)]
        most, ended, is_ending = max(map(len, draws)), set[int](), False
        for step in range(most):
            replay_draw()
            if step + 1 == most or is_ending or interrupted[0]:
                return step + 1
            self._host_tokens[step].copy_(self._outputs["tokens"][step], non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._replay_advance()
            if self._copied is not None:
                self._copied.synchronize()
            drawn = self._host_results["tokens"][step].tolist()
            for s, (token, own, ends) in enumerate(zip(drawn, draws, stops, strict=False)):
                if token == NO_LOGITS or token in ends or step + 1 >= len(own):
                    ended.add(s)
            is_ending = bool(ended) if self._config is None else len(ended) == len(draws)
        return most

    def fetch(self, draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        self._host_buffer.copy_(self._results)
        return [self._samples(s, own) for s, own in enumerate(draws)]

    def _samples(self, s: int, draws: Sequence[Draw]) -> list[Sample]:
        """The samples of a sequence, up to the first without a token."""
        tokens, ids, weights = (self._host_results[name][: len(draws), s] for name in ("tokens", "ids", "weights"))
        params, _, noise, _ = draws[0]
        is_draft, scores = self._config is not None, None
        if is_draft and params.is_greedy:
            own = self._logits[: len(draws), s, : self._size.vocab_size].clone()
            scores = without_mask(own, self._size.vocab_size, self._size.mask_token)
        samples = list[Sample]()
        for i, token in enumerate(tokens.tolist()):
            if token == NO_LOGITS:
                return [*samples, Sample(NO_LOGITS)]
            q = _support(ids[i], weights[i]) if is_draft and noise is None and not params.is_greedy else None
            samples.append(Sample(token, q, None if scores is None else scores[i]))
        return samples

    # -------------------------------------------------------------------------------------------------- ways to draw

    def _draw_for(self, draws: Sequence[Sequence[Draw]]) -> Callable[[], None]:
        if all(own[0].params.is_greedy for own in draws):
            return self._draw_greedily
        by_uniform = any(own[0].noise is None and not own[0].params.is_greedy for own in draws)
        return self._draw_truncated if by_uniform and self._config is not None else self._draw_untruncated

    # ------------------------------------------------------------------------------------------------------- captured

    def _draw_greedily(self) -> None:
        """Samples a token of each sequence from the logits of this step, where all temperatures are 0."""
        step = self._step()
        self._keep(step, self._next(self._logits_of(step), greedily=True))

    def _draw_untruncated(self) -> None:
        """The same for a target, or where noise chooses the tokens of a draft."""
        step = self._step()
        self._keep(step, self._next(self._logits_of(step), greedily=False))

    def _draw_truncated(self) -> None:
        """The same for a draft, from q̂."""
        from kernels.triton_truncate import sample_truncated  # triton is optional

        assert self._config is not None
        inputs, outputs, step = self._inputs, self._outputs, self._step()
        logits, uniforms = self._logits_of(step), inputs["uniforms"].index_select(0, step).squeeze(0)
        drawn = sample_truncated(logits, inputs["ints"], inputs["floats"], uniforms, self._config)
        outputs["ids"].index_copy_(0, step, drawn.ids.unsqueeze(0))
        outputs["weights"].index_copy_(0, step, drawn.weights.unsqueeze(0))
        others = self._next(logits, greedily=False)
        self._keep(step, torch.where(inputs["untruncated"] != 0, others, drawn.tokens))

    def _next(self, logits: Tensor, *, greedily: bool) -> Tensor:
        from kernels.verify_triton import draw_next  # triton is optional

        inputs = self._inputs
        tokens = draw_next(logits, inputs["ints"], inputs["floats"], inputs["uniforms"].flatten(), greedily=greedily)
        inputs["ints"].add_(self._growth)
        return tokens

    def _step(self) -> Tensor:
        return self._inputs["step"].clamp(max=self._size.tokens - 1)

    def _logits_of(self, step: Tensor) -> Tensor:
        """The logits of a step, `[S, V]`; of a draft a copy."""
        if self._config is None:
            return self._logits[0, :, : self._size.vocab_size]
        return without_mask(self._logits.index_select(0, step).squeeze(0), self._size.vocab_size, self._size.mask_token)

    def _keep(self, step: Tensor, tokens: Tensor) -> None:
        self._outputs["tokens"].index_copy_(0, step, tokens.unsqueeze(0))
        self._batch.tokens.copy_(tokens.clamp(min=0))

    def _advance(self) -> None:
        """Runs the sampled tokens; their logits are the input of the next step."""
        batch, block_tokens, kept = self._batch, self._eager.memory.block_tokens, len(self._logits)
        positions = self._inputs["positions"]
        is_own = positions < self._inputs["limits"]
        batch.positions.copy_(positions.clamp(max=self._eager.max_length - 1))
        block = batch.block_tables.gather(1, (batch.positions // block_tokens).unsqueeze(1)).squeeze(1)
        slot = block * block_tokens + batch.positions % block_tokens
        batch.slot_mapping.copy_(torch.where(is_own, slot, self._eager.memory.null_position))
        batch.lengths.copy_(batch.positions + 1)
        logits = self._eager.program(batch.tokens, batch, None)
        positions.add_(1)
        self._inputs["step"].add_(1)
        if logits is not batch.logits:
            logits = logits.to(self._logits.dtype)
            self._logits.index_copy_(0, self._inputs["step"].clamp(max=kept - 1), logits.unsqueeze(0))


def _support(ids: np.ndarray, weights: np.ndarray) -> SparseDistribution:
    """q̂ of a row of `DeviceSamples`."""
    size = int(np.count_nonzero(weights))
    return SparseDistribution(ids[:size].copy(), weights[:size].astype(np.uint16), int(weights.sum(dtype=np.int64)))
