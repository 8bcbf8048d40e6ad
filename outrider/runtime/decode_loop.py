"""The decode loop: several tokens of each of a few sequences in one call, each drawn from the logits after the last.

Where steps are captured (over a paged pool), a step draws a token of each sequence on the device and runs it; it is
captured once for each number of sequences and replayed for each token, and replays do not wait for each other on the
host. Elsewhere the same steps are taken one by one, and `kernels.sampling` draws between them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels import sampling_device
from kernels.attention_work import ITEM, work_list, work_size
from kernels.packed_arrays import Field, PackedArrays
from kernels.sampling import NO_LOGITS, Draw, Sample, sample
from kernels.sampling_device import DeviceDraws
from kernels.sparse import SparseConfig
from outrider.runtime.batch import Chunk, PagedBatch, lay_out, pack
from outrider.runtime.cuda_graph import CannotCapture, Capturer, PagedRunner
from outrider.runtime.model_runner import ModelRunner


class DecodeLoop:
    """Decodes with one model.

    Args:
        model_runner: the model.
        vocab_size: tokens that may be drawn; the model's logits may have more.
        config: how much of q is kept.
    """

    def __init__(self, model_runner: ModelRunner, vocab_size: int, config: SparseConfig) -> None:
        self.model_runner = model_runner
        self.vocab_size = vocab_size
        self.config = config
        self._captured: CapturedSteps | None = None

    def obstacle(self, draws: Sequence[Sequence[Draw]]) -> str | None:
        """Why `decode` cannot draw these; None where it can."""
        if self._captured is not None:
            return self._captured.obstacle(draws)
        return None if self.model_runner.paged_runner is None else "no steps are captured"

    @torch.inference_mode()
    def decode(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        """Runs a chunk of each sequence, draws its next token, runs that, and so on; the last one drawn is not run.

        Each sequence gets one token for each of its draws: the one that `kernels.sampling.sample` gives. Afterwards a
        slot holds its chunk and the tokens drawn but the last. If it raises, no slot has changed its length.

        Returns:
            The samples of each sequence; none follows one without a token.

        Raises:
            ValueError: a chunk or its tokens do not fit their slot, a token is outside the vocabulary, or there is an
                `obstacle`.
            PoolExhausted: see `ModelRunner.forward`.
        """
        model_runner, pool = self.model_runner, self.model_runner.pool
        model_runner.check(chunks)
        for chunk, own in zip(chunks, draws, strict=True):
            rows = len(chunk.tokens) + len(own) - 1
            if chunk.start + rows > pool.max_length:
                raise ValueError(
                    f"slot {chunk.slot} holds {chunk.start} positions: {rows} more go beyond its {pool.max_length}"
                )
        if (why := self.obstacle(draws)) is not None:
            raise ValueError(f"{model_runner.loaded.name} cannot decode: {why}")
        samples = self._step_by_step(chunks, draws) if self._captured is None else self._captured.decode(chunks, draws)
        for chunk, own_samples in zip(chunks, samples, strict=True):
            pool.extend(chunk.slot, chunk.start + len(chunk.tokens) + len(own_samples) - 1)
        return samples

    def _step_by_step(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        model_runner = self.model_runner
        samples: list[list[Sample]] = [[] for _ in chunks]
        active = list(range(len(chunks)))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        counts = [len(chunk.tokens) for chunk in chunks]
        spans = ((chunk.slot, chunk.start, count) for chunk, count in zip(chunks, counts, strict=True))
        batch = pack(spans, model_runner.pool, model_runner.masks, ahead=[len(own) - 1 for own in draws])
        last: Tensor | None = torch.tensor(counts, device=model_runner.loaded.device).cumsum(0) - 1
        while active:
            z = model_runner.run_packed(tokens, batch, last).narrow(1, 0, self.vocab_size)
            drawn = sample(z, [draws[b][len(samples[b])] for b in active], self.config)
            for b, each in zip(active, drawn, strict=True):
                samples[b].append(each)
            going = [i for i, b in enumerate(active) if drawn[i].token >= 0 and len(samples[b]) < len(draws[b])]
            tokens, last = [drawn[i].token for i in going], None
            active = [active[i] for i in going]
            batch = batch.next_rows(going)
        return samples

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
        """Has steps captured, where the pool is paged.

        Args:
            capturer: of the model's device.
            sequences: see `DecodeLoopSize`; likewise `tokens` and `with_noise`.
            tokens: see `sequences`.
            with_noise: see `sequences`.
            seconds: see `CapturedSteps.capture`; likewise `most_bytes`, and what is returned.
            most_bytes: see `seconds`.
        """
        model_runner = self.model_runner
        eager = model_runner.captured.eager if model_runner.captured is not None else model_runner.paged_runner
        if not isinstance(eager, PagedRunner):
            return "none: keys and values are not in pages"
        size = DecodeLoopSize(
            sequences=sequences,
            tokens=tokens,
            max_length=model_runner.pool.max_length,
            block_tokens=model_runner.pool.block_tokens,
            vocab_size=self.vocab_size,
            logits_size=model_runner.loaded.vocab_size,
            with_noise=with_noise,
        )
        self._captured = CapturedSteps(model_runner, eager, size, self.config)
        return self._captured.capture(capturer, seconds=seconds, most_bytes=most_bytes)


@dataclass(frozen=True, slots=True)
class DecodeLoopSize:
    """What a decode loop has room for.

    Attributes:
        sequences: at most, in one call.
        tokens: of each at most, γ.
        max_length: positions of a sequence.
        block_tokens: positions of a block.
        vocab_size: tokens that may be drawn.
        logits_size: those that the model has logits for.
        with_noise: whether noise may choose tokens, which takes the verification's kernels.
    """

    sequences: int
    tokens: int
    max_length: int
    block_tokens: int
    vocab_size: int
    logits_size: int
    with_noise: bool


class CapturedSteps:
    """Captured steps of up to so many sequences at once.

    Args:
        model_runner: the model.
        eager: its runner.
        size: what there is room for.
        config: how much of q is kept.
    """

    def __init__(
        self, model_runner: ModelRunner, eager: PagedRunner, size: DecodeLoopSize, config: SparseConfig
    ) -> None:
        self._model_runner = model_runner
        self._eager = eager
        self._size = size
        self._config = config
        self._tables: list[_Table] = []  # the smallest first
        # [γ, S, V]: what each token was drawn from; all sizes use the same room, one at a time.
        self._logits = torch.zeros(
            size.tokens * size.sequences, size.logits_size, dtype=eager.dtype, device=eager.device
        )

    def obstacle(self, draws: Sequence[Sequence[Draw]]) -> str | None:
        """Why these cannot be drawn here; None where they can."""
        most = self._tables[-1].sequences if self._tables else 0
        if len(draws) > most:
            return f"{len(draws)} sequences, where there is room for {most}"
        for own in draws:
            if len(own) > self._size.tokens:
                return f"{len(own)} tokens, where there is room for {self._size.tokens}"
            for each in own:
                if (why := sampling_device.obstacle(each)) is not None:
                    return why
                if each.noise is not None and not self._size.with_noise:
                    return "noise, which takes Triton"
        return None

    def decode(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        """See `DecodeLoop.decode`; the slots keep their length."""
        model_runner, pool = self._model_runner, self._model_runner.pool
        assert model_runner.paged_runner is not None
        for chunk, own in zip(chunks, draws, strict=True):
            pool.grow(chunk.slot, chunk.start + len(chunk.tokens) + len(own) - 1)
        # A graph has logits of every row, so that short chunks ask for them all.
        layout = lay_out([replace(chunk, logits_from=0) for chunk in chunks], pool)
        last = layout.row_starts[1:] - 1
        if model_runner.captured is None or model_runner.captured.find(layout) is None:
            layout = lay_out([replace(chunk, logits_from=len(chunk.tokens) - 1) for chunk in chunks], pool)
            last = np.arange(len(chunks))
        logits = model_runner.paged_runner.run(layout)
        if len(logits) > len(last):
            logits = logits.index_select(0, torch.from_numpy(last).to(logits.device))
        table = next(each for each in self._tables if each.sequences >= len(chunks))
        table.fill(chunks, [pool.block_table(chunk.slot) for chunk in chunks], logits, draws)
        table.run(max(map(len, draws)) - 1)
        return table.fetch(draws)

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
            In a few words what is captured, and what is not, and why.
        """
        counts = sorted({min(1 << i, self._size.sequences) for i in range(self._size.sequences.bit_length() + 1)})
        began, why = clock(), ""
        for count in counts:
            spent = clock() - began
            if spent * (len(self._tables) + 1) > seconds * max(1, len(self._tables)):
                why = f"{spent:.1f} s have passed, and all may take {seconds:g}"
            elif capturer.bytes > most_bytes:
                why = f"they hold {capturer.bytes >> 20} MiB of {most_bytes >> 20}"
            if why:
                break
            table = _Table(self._eager, self._size, self._config, count, self._logits)
            try:
                table.capture(capturer)
            except CannotCapture as error:
                why = str(error)
                break
            self._tables.append(table)
        return f"steps of up to {self._tables[-1].sequences if self._tables else 0} sequences" + (
            f": {why}" if why else ""
        )


class _Table:
    """The tensors that steps of S sequences read and write, and the graphs of those steps."""

    def __init__(
        self, eager: PagedRunner, size: DecodeLoopSize, config: SparseConfig, sequences: int, logits: Tensor
    ) -> None:
        self.sequences = S = sequences
        self._eager, self._size, self._config = eager, size, config
        self._logits = logits[: size.tokens * S].view(size.tokens, S, -1)
        pages = -(-size.max_length // size.block_tokens)
        items, slots = work_size(S, size.max_length + size.tokens)
        support = min(config.max_support, size.vocab_size)
        on_gpu = eager.device.type == "cuda"
        put = PackedArrays(
            {
                "positions": Field(np.int64, (S,)),
                "limits": Field(np.int64, (S,)),  # rows at these positions and later are nobody's
                "bits": Field(np.int64, (size.tokens, S)),
                "by_noise": Field(np.int64, (S,)),
                "seeds": Field(np.int64, (S,)),
                "noise_positions": Field(np.int64, (S,)),
                "step": Field(np.int64, (1,)),
                "temperatures": Field(np.float64, (S,)),
                "tables": Field(np.int32, (S, pages)),
                "items": Field(np.int32, (items, ITEM)),
                "row_slots": Field(np.int32, (S,)),
            }
        )
        self._staged = put.buffer(torch.device("cpu"), pinned=on_gpu)
        self._staged.zero_()
        self._host = put.arrays(self._staged)
        self._buffer = self._staged.to(eager.device)
        self._put = put.tensors(self._buffer)
        got = PackedArrays(
            {
                "tokens": Field(np.int64, (size.tokens, S)),
                "ids": Field(np.int64, (size.tokens, S, support)),
                "weights": Field(np.int32, (size.tokens, S, support)),
            }
        )
        self._results = got.buffer(eager.device)
        self._got = got.tensors(self._results)
        self._fetched = got.buffer(torch.device("cpu"), pinned=on_gpu)
        self._told = got.arrays(self._fetched)
        self._drawn_from = torch.zeros(S, size.logits_size, dtype=eager.dtype, device=eager.device)
        self._batch = PagedBatch(
            tokens=torch.zeros(S, dtype=torch.int64, device=eager.device),
            positions=torch.zeros(S, dtype=torch.int64, device=eager.device),
            places=torch.full((S,), eager.memory.null_position, dtype=torch.int64, device=eager.device),
            rows=torch.arange(S, device=eager.device),
            row_starts=torch.arange(S + 1, dtype=torch.int32, device=eager.device),
            lengths=torch.ones(S, dtype=torch.int32, device=eager.device),
            tables=self._put["tables"],
            items=self._put["items"],
            row_slots=self._put["row_slots"],
            slots=slots,
            memory=eager.memory,
            attention=eager.attention,
        )
        self._replay_step: Callable[[], None]
        self._replay_draw: Callable[[], None]

    def capture(self, capturer: Capturer) -> None:
        """Captures a step, and the last draw."""
        self._put["step"].zero_()
        self._replay_step = capturer.capture(self._step)
        self._put["step"].zero_()
        self._replay_draw = capturer.capture(self._draw)

    def fill(
        self,
        chunks: Sequence[Chunk],
        tables: Sequence[Sequence[int]],
        logits: Tensor,
        draws: Sequence[Sequence[Draw]],
    ) -> None:
        """Puts in place what the first step begins with."""
        host = self._host
        for array in host.values():
            array[...] = 0
        for s, (chunk, blocks, own) in enumerate(zip(chunks, tables, draws, strict=True)):
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
            host["tables"][s, : len(blocks)] = blocks
        # Each has one row, which moves on with every step.
        work = work_list(np.arange(self.sequences + 1), host["positions"] + 1, growth=self._size.tokens)
        host["items"][: len(work.items)], host["row_slots"][...] = work.items, work.row_slots
        self._buffer.copy_(self._staged, non_blocking=True)
        self._logits[0, : len(chunks)].copy_(logits)

    def run(self, steps: int) -> None:
        """So many steps, and one more draw."""
        for _ in range(steps):
            self._replay_step()
        self._replay_draw()

    def fetch(self, draws: Sequence[Sequence[Draw]]) -> list[list[Sample]]:
        """Waits for the results."""
        self._fetched.copy_(self._results)
        return [self._samples(s, own) for s, own in enumerate(draws)]

    def _samples(self, s: int, draws: Sequence[Draw]) -> list[Sample]:
        count = len(draws)
        tokens, ids, weights = (self._told[name][:count, s] for name in ("tokens", "ids", "weights"))
        samples = sampling_device.to_samples(tokens, ids, weights, draws)
        end = next((i + 1 for i, each in enumerate(samples) if each.token == NO_LOGITS), count)  # the rest is garbage
        if draws[0].params.is_greedy:
            rows = self._logits[:end, s, : self._size.vocab_size].clone().unbind(0)
            return [
                each if each.token == NO_LOGITS else each._replace(scores=row)
                for each, row in zip(samples[:end], rows, strict=True)
            ]
        return samples[:end]

    # ------------------------------------------------------------------------------------------------------- captured

    def _step(self) -> None:
        self._draw()
        self._advance()

    def _draw(self) -> None:
        """A token of each sequence from the logits of this step."""
        put, V = self._put, self._size.vocab_size
        step = put["step"].clamp(max=self._size.tokens - 1)
        self._drawn_from.copy_(self._logits.index_select(0, step).squeeze(0))
        bits = put["bits"].index_select(0, step).squeeze(0)
        noise = (put["by_noise"], put["seeds"], put["noise_positions"]) if self._size.with_noise else ()
        drawn = sampling_device.sample(
            self._drawn_from[:, :V], DeviceDraws(put["temperatures"], bits, *noise), self._config
        )
        put["noise_positions"].add_(1)
        for name, each in zip(("tokens", "ids", "weights"), drawn, strict=True):
            self._got[name].index_copy_(0, step, each.unsqueeze(0))
        self._batch.tokens.copy_(drawn.tokens.clamp(min=0))

    def _advance(self) -> None:
        """Runs the tokens drawn; their logits are those of the next step."""
        batch, size = self._batch, self._size
        positions = self._put["positions"]
        is_own = positions < self._put["limits"]
        batch.positions.copy_(positions.clamp(max=size.max_length - 1))
        block = batch.tables.gather(1, (batch.positions // size.block_tokens).unsqueeze(1)).squeeze(1)
        place = block * size.block_tokens + batch.positions % size.block_tokens
        batch.places.copy_(torch.where(is_own, place, self._eager.memory.null_position))
        batch.lengths.copy_(batch.positions + 1)
        logits = self._eager.program(batch.tokens, batch, None).to(self._logits.dtype)
        positions.add_(1)
        self._put["step"].add_(1)
        self._logits.index_copy_(0, self._put["step"].clamp(max=size.tokens - 1), logits.unsqueeze(0))
