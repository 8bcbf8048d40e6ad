"""The decode loop: samples several tokens in a row for each of a few sequences, in one call.

Over a paged pool the steps are CUDA graphs: one step samples a token of each sequence on the device and runs it. A step
is captured once per number of sequences and replayed for each token, without host syncs in between. On a CPU the
whole loop is in C (`kernels.cpu_decode_loop`), where our decoder in C or llama.cpp runs the model. Otherwise the steps
run eagerly, and `kernels.sampling` samples between them.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels import sampling_device
from kernels.attention_work import ITEM, work_list, work_size
from kernels.cpu_decode_loop import LoopArrays
from kernels.packed_arrays import Field, PackedArrays
from kernels.sampling import NO_LOGITS, Draw, Sample, sample
from kernels.sampling_device import DeviceDraws
from kernels.sparse import SparseConfig
from outrider.runtime.batch import Chunk, PagedBatch, build_batch
from outrider.runtime.cuda_graph import CannotCapture, Capturer, PagedRunner
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
        model_runner: the model.
        vocab_size: tokens that may be sampled; the model's logits may have more.
        config: how q is truncated; None, for a target, draws from p itself.

    Attributes:
        interrupt: ends each call after one token while it is set; captured steps ignore it.
    """

    def __init__(self, model_runner: ModelRunner, vocab_size: int, config: SparseConfig | None) -> None:
        self.model_runner = model_runner
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
        z = logits[:, : self.vocab_size]
        if self._mask_token is not None and self._mask_token < self.vocab_size:
            z[:, self._mask_token] = -math.inf
        return z

    def obstacle(self, draws: Sequence[Sequence[Draw]]) -> str | None:
        """Why `decode` does not support these draws; None if it does."""
        if self._captured is not None:
            return self._captured.obstacle(draws)
        return None if self.model_runner.paged_runner is None else "no steps are captured for a paged KV cache"

    @torch.inference_mode()
    def decode(
        self,
        chunks: Sequence[Chunk],
        draws: Sequence[Sequence[Draw]],
        stops: Sequence[Collection[int]] | None = None,
    ) -> list[list[Sample]]:
        """Runs a chunk of each sequence, samples its next token, runs that token, and so on. The last token is not run.

        Each sequence gets one token per draw, as by `kernels.sampling.sample`, up to the first of its `stops`; fewer if
        the loop is interrupted. A target's loop ends for all sequences where one of them ends, so that the end of a
        text is not held up; captured steps do not.
        Afterwards a slot holds its chunk and all sampled tokens but the last. If it raises, no slot has changed its
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
        if (why := self.obstacle(draws)) is not None:
            raise ValueError(f"the decode loop of {model_runner.loaded.name} does not support {why}")
        stops = stops or [()] * len(chunks)
        if self._captured is not None:
            samples = self._captured.decode(chunks, draws)
        elif model_runner.has_loop_in_c(len(chunks)):
            loop = LoopArrays(
                draws, self.config, vocab_size=self.vocab_size, mask_token=self._mask_token, stops=stops,
                interrupted=self.interrupt.flag,
            )  # fmt: skip
            samples = model_runner.run_loop(chunks, [len(own) - 1 for own in draws], loop)
        else:
            samples = self._step_by_step(chunks, draws, stops)
        samples = list(map(_to_stop, samples, stops))
        for chunk, own_samples in zip(chunks, samples, strict=True):
            pool.extend(chunk.slot, chunk.start + len(chunk.tokens) + len(own_samples) - 1)
        return samples

    def _step_by_step(
        self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]], stops: Sequence[Collection[int]]
    ) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in chunks]
        active = list(range(len(chunks)))
        steps = self.model_runner.steps(chunks, [len(own) - 1 for own in draws])
        logits = steps.first()
        while True:
            drawn = sample(self.without_mask(logits), [draws[b][len(samples[b])] for b in active], self.config)
            for b, each in zip(active, drawn, strict=True):
                samples[b].append(each)
            going = [
                i
                for i, b in enumerate(active)
                if drawn[i].token >= 0 and len(samples[b]) < len(draws[b]) and drawn[i].token not in stops[b]
            ]
            active = [active[i] for i in going]
            is_over = len(active) < len(chunks) if self.config is None else not active
            if is_over or self.interrupt.flag[0]:
                return samples
            logits = steps.next(going, [drawn[i].token for i in going])

    def capture(
        self,
        capturer: Capturer,
        *,
        sequences: int,
        tokens: int,
        with_noise: bool,
        seconds: float,
        most_bytes: int,
    ) -> str:
        """Captures the steps, if the pool is paged.

        Args:
            capturer: of the model's device.
            sequences, tokens, with_noise: see `DecodeLoopSize`.
            seconds, most_bytes: see `GraphRunner.capture`.

        Returns:
            One line for the log.
        """
        model_runner = self.model_runner
        eager = model_runner.captured.eager if model_runner.captured is not None else model_runner.paged_runner
        if not isinstance(eager, PagedRunner):
            return "none: the KV cache is not paged"
        size = DecodeLoopSize(
            sequences=sequences,
            tokens=tokens,
            max_length=model_runner.max_length,
            block_tokens=model_runner.pool.block_tokens,
            vocab_size=self.vocab_size,
            logits_size=model_runner.loaded.vocab_size,
            with_noise=with_noise,
            mask_token=self._mask_token,
        )
        self._captured = CapturedSteps(model_runner, eager, size, self.config)
        return self._captured.capture(capturer, seconds=seconds, most_bytes=most_bytes)


def _to_stop(samples: list[Sample], stops: Collection[int]) -> list[Sample]:
    """The samples up to the first of `stops`."""
    end = next((i + 1 for i, each in enumerate(samples) if each.token in stops), len(samples)) if stops else None
    return samples[:end]


@dataclass(frozen=True, slots=True)
class DecodeLoopSize:
    """The limits of captured steps.

    Attributes:
        sequences: the most sequences of one call.
        tokens: the most tokens of each, γ.
        max_length: the longest sequence, in positions.
        block_tokens: positions of a block.
        vocab_size: tokens that may be sampled.
        logits_size: tokens in the model's logits.
        with_noise: whether draws may use Gumbel noise, which needs the verification kernels.
        mask_token: is never sampled; None if the model has none.
    """

    sequences: int
    tokens: int
    max_length: int
    block_tokens: int
    vocab_size: int
    logits_size: int
    with_noise: bool
    mask_token: int | None = None

    def exclude_mask(self, logits: Tensor) -> Tensor:
        """Sets the logit of the mask token, in `[…, V]`, to -inf. Returns the same tensor."""
        if self.mask_token is not None and self.mask_token < logits.size(-1):
            logits[..., self.mask_token] = -math.inf
        return logits


class CapturedSteps:
    """Captured steps for 1, 2, 4 … sequences.

    Args:
        model_runner: the model.
        eager: its runner.
        size: the limits.
        config: see `DecodeLoop`.
    """

    def __init__(
        self, model_runner: ModelRunner, eager: PagedRunner, size: DecodeLoopSize, config: SparseConfig | None
    ) -> None:
        self._model_runner = model_runner
        self._eager = eager
        self._size = size
        self._config = config
        self._buffers: list[_StepBuffers] = []  # the smallest first
        # [γ, S, V]: the logits of each token; the graphs of all sizes share this buffer.
        self._logits = torch.zeros(
            size.tokens * size.sequences, size.logits_size, dtype=eager.dtype, device=eager.device
        )

    def obstacle(self, draws: Sequence[Sequence[Draw]]) -> str | None:
        """Why these draws are not supported; None if they are."""
        most = self._buffers[-1].sequences if self._buffers else 0
        if len(draws) > most:
            return f"{len(draws)} sequences; steps of {most} at most are captured"
        for own in draws:
            if len(own) > self._size.tokens:
                return f"{len(own)} tokens; {self._size.tokens} at most are captured"
            for each in own:
                if (why := sampling_device.obstacle(each)) is not None:
                    return why
                if each.noise is not None and not self._size.with_noise:
                    return "noise, which needs Triton"
        return None

    def decode(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        """See `DecodeLoop.decode`; lengths of slots do not change."""
        model_runner, pool = self._model_runner, self._model_runner.pool
        assert model_runner.paged_runner is not None
        for chunk, own in zip(chunks, draws, strict=True):
            pool.grow(chunk.slot, chunk.start + len(chunk.tokens) + len(own) - 1)
        last = [replace(chunk, logits_from=len(chunk.tokens) - 1) for chunk in chunks]
        logits = model_runner.paged_runner.run(build_batch(last, pool))
        buffers = next(each for each in self._buffers if each.sequences >= len(chunks))
        buffers.fill(chunks, [pool.block_table(chunk.slot) for chunk in chunks], logits, draws)
        buffers.run(max(map(len, draws)) - 1, greedily=all(own[0].params.is_greedy for own in draws))
        return buffers.fetch(draws)

    @torch.inference_mode()
    def capture(
        self,
        capturer: Capturer,
        *,
        seconds: float,
        most_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
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
        self, eager: PagedRunner, size: DecodeLoopSize, config: SparseConfig | None, sequences: int, logits: Tensor
    ) -> None:
        self.sequences = S = sequences
        self._eager, self._size, self._config = eager, size, config
        self._logits = logits[: size.tokens * S].view(size.tokens, S, -1)
        blocks = -(-size.max_length // size.block_tokens)
        items, slots = work_size(S, size.max_length + size.tokens)
        support = 0 if config is None else min(config.max_support, size.vocab_size)
        on_gpu = eager.device.type == "cuda"
        inputs = PackedArrays(
            {
                "positions": Field(np.int64, (S,)),
                "limits": Field(np.int64, (S,)),  # rows from these positions on are padding
                "bits": Field(np.int64, (size.tokens, S)),
                "by_noise": Field(np.int64, (S,)),
                "seeds": Field(np.int64, (S,)),
                "noise_positions": Field(np.int64, (S,)),
                "step": Field(np.int64, (1,)),
                "temperatures": Field(np.float64, (S,)),
                "block_tables": Field(np.int32, (S, blocks)),
                "items": Field(np.int32, (items, ITEM)),
                "row_slots": Field(np.int32, (S,)),
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
        self._batch = PagedBatch(
            tokens=torch.zeros(S, dtype=torch.int64, device=eager.device),
            positions=torch.zeros(S, dtype=torch.int64, device=eager.device),
            slot_mapping=torch.full((S,), eager.memory.null_position, dtype=torch.int64, device=eager.device),
            rows=torch.arange(S, device=eager.device),
            row_starts=torch.arange(S + 1, dtype=torch.int32, device=eager.device),
            lengths=torch.ones(S, dtype=torch.int32, device=eager.device),
            block_tables=self._inputs["block_tables"],
            items=self._inputs["items"],
            row_slots=self._inputs["row_slots"],
            slots=slots,
            memory=eager.memory,
            attention=eager.attention,
        )
        self._replay_draw: Callable[[], None]
        self._replay_greedy_draw: Callable[[], None]
        self._replay_advance: Callable[[], None]

    def capture(self, capturer: Capturer) -> None:
        """Captures the two parts of a step: the draw, by either way, and the run of the tokens."""
        self._inputs["step"].zero_()
        self._replay_draw = capturer.capture(self._draw)
        self._replay_greedy_draw = capturer.capture(self._draw_greedily)
        self._replay_advance = capturer.capture(self._advance)

    def fill(
        self,
        chunks: Sequence[Chunk],
        block_tables: Sequence[Sequence[int]],
        logits: Tensor,
        draws: Sequence[Sequence[Draw]],
    ) -> None:
        """Writes the inputs of the first step."""
        host = self._host
        for array in host.values():
            array[...] = 0
        for s, (chunk, blocks, own) in enumerate(zip(chunks, block_tables, draws, strict=True)):
            count = len(own)
            host["positions"][s] = chunk.start + len(chunk.tokens)
            host["limits"][s] = chunk.start + len(chunk.tokens) + count - 1
            host["bits"][:count, s] = [int(each.uniform * 2.0**53) for each in own]
            if own[0].noise is not None:
                seed, position = own[0].noise
                host["by_noise"][s] = 1
                host["seeds"][s] = seed - 2**64 if seed >= 2**63 else seed
                host["noise_positions"][s] = position
            host["temperatures"][s] = own[0].params.temperature
            host["block_tables"][s, : len(blocks)] = blocks
        # Each sequence has one row, whose position grows by 1 per step.
        work = work_list(np.arange(self.sequences + 1), host["positions"] + 1, growth=self._size.tokens)
        host["items"][: len(work.items)], host["row_slots"][...] = work.items, work.row_slots
        self._buffer.copy_(self._staged, non_blocking=True)
        self._logits[0, : len(chunks)].copy_(logits)

    def run(self, steps: int, *, greedily: bool) -> None:
        """Replays `steps` steps and the last draw. `greedily`: all temperatures are 0."""
        draw = self._replay_greedy_draw if greedily else self._replay_draw
        for _ in range(steps):
            draw()
            self._replay_advance()
        draw()

    def fetch(self, draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        """Waits for the results and returns the samples."""
        self._host_buffer.copy_(self._results)
        return [self._samples(s, own) for s, own in enumerate(draws)]

    def _samples(self, s: int, draws: Sequence[Draw]) -> list[Sample]:
        count = len(draws)
        tokens, ids, weights = (self._host_results[name][:count, s] for name in ("tokens", "ids", "weights"))
        samples = sampling_device.to_samples(tokens, ids, weights, draws)
        end = next(
            (i + 1 for i, each in enumerate(samples) if each.token == NO_LOGITS), count
        )  # later samples have no meaning
        if draws[0].params.is_greedy and self._config is not None:
            rows = self._size.exclude_mask(self._logits[:end, s, : self._size.vocab_size].clone()).unbind(0)
            return [
                each if each.token == NO_LOGITS else each._replace(scores=row)
                for each, row in zip(samples[:end], rows, strict=True)
            ]
        return samples[:end]

    # ------------------------------------------------------------------------------------------------------- captured

    def _draw(self) -> None:
        """Samples a token of each sequence from the logits of this step."""
        inputs, step = self._inputs, self._step()
        bits = inputs["bits"].index_select(0, step).squeeze(0)
        noise = (inputs["by_noise"], inputs["seeds"], inputs["noise_positions"]) if self._size.with_noise else ()
        drawn = sampling_device.sample(
            self._logits_of(step), DeviceDraws(inputs["temperatures"], bits, *noise), self._config
        )
        inputs["noise_positions"].add_(1)
        for name, each in zip(("ids", "weights"), drawn[1:], strict=True):
            self._outputs[name].index_copy_(0, step, each.unsqueeze(0))
        self._keep(step, drawn.tokens)

    def _draw_greedily(self) -> None:
        """The same at temperature 0: no q̂, no noise."""
        step = self._step()
        self._keep(step, sampling_device.sample_greedily(self._logits_of(step)))

    def _step(self) -> Tensor:
        return self._inputs["step"].clamp(max=self._size.tokens - 1)

    def _logits_of(self, step: Tensor) -> Tensor:
        """A copy of the logits of a step, `[S, V]`."""
        return self._size.exclude_mask(self._logits.index_select(0, step).squeeze(0))[:, : self._size.vocab_size]

    def _keep(self, step: Tensor, tokens: Tensor) -> None:
        self._outputs["tokens"].index_copy_(0, step, tokens.unsqueeze(0))
        self._batch.tokens.copy_(tokens.clamp(min=0))

    def _advance(self) -> None:
        """Runs the sampled tokens; their logits are the input of the next step."""
        batch, size = self._batch, self._size
        positions = self._inputs["positions"]
        is_own = positions < self._inputs["limits"]
        batch.positions.copy_(positions.clamp(max=size.max_length - 1))
        block = batch.block_tables.gather(1, (batch.positions // size.block_tokens).unsqueeze(1)).squeeze(1)
        slot = block * size.block_tokens + batch.positions % size.block_tokens
        batch.slot_mapping.copy_(torch.where(is_own, slot, self._eager.memory.null_position))
        batch.lengths.copy_(batch.positions + 1)
        logits = self._eager.program(batch.tokens, batch, None).to(self._logits.dtype)
        positions.add_(1)
        self._inputs["step"].add_(1)
        self._logits.index_copy_(0, self._inputs["step"].clamp(max=size.tokens - 1), logits.unsqueeze(0))
