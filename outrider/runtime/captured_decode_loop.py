"""Several tokens of each of a few sequences with no word to the host in between: draws and passes, as graphs.

A step draws a token of each sequence from its logits, puts it into the next pass, and runs that. It is captured once
and replayed for each token: replays do not wait for each other on the host. It knows runners, laws and pages; not what
the tokens are for.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import draw_static
from kernels.attention_work import ITEM, work_list, work_size
from kernels.packed_arrays import Field, PackedArrays
from kernels.sparse import SparseConfig, SparseLaw
from outrider.runtime.batch import Chunk
from outrider.runtime.cuda_graph import CannotCapture, Capturer, PagedRunner
from outrider.runtime.decode_loop import Decoded, Sampling
from outrider.runtime.paged import PagedBatch


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
        races: whether tokens may be chosen by noise of their positions: it takes the verification's kernels.
    """

    sequences: int
    tokens: int
    max_length: int
    block_tokens: int
    vocab_size: int
    logits_size: int
    races: bool


class CapturedDecodeLoop:
    """Decodes up to so many sequences at once.

    Args:
        eager: the model.
        size: what there is room for.
        config: how much of a law is kept.
    """

    def __init__(self, eager: PagedRunner, size: DecodeLoopSize, config: SparseConfig) -> None:
        self._eager = eager
        self._size = size
        self._config = config
        self._tables: list[_Table] = []  # the smallest first
        # [γ, S, V]: what each token was drawn from; all sizes use the same room, one at a time.
        self._logits = torch.zeros(
            size.tokens * size.sequences, size.logits_size, dtype=eager.dtype, device=eager.device
        )

    def refusal(self, samplings: Sequence[Sampling]) -> str | None:
        """Why these cannot be decoded here; None where they can."""
        most = self._tables[-1].sequences if self._tables else 0
        if len(samplings) > most:
            return f"{len(samplings)} sequences, where there is room for {most}"
        return next((reason for each in samplings if (reason := self._refusal(each)) is not None), None)

    def _refusal(self, sampling: Sampling) -> str | None:
        if len(sampling.uniforms) > self._size.tokens:
            return f"{len(sampling.uniforms)} tokens, where there is room for {self._size.tokens}"
        if not draw_static.is_drawable(sampling.law):
            return "a law with filters"
        if sampling.config != self._config or sampling.vocab_size != self._size.vocab_size:
            return f"laws are kept to {self._config}, over {self._size.vocab_size} tokens"
        if len(sampling.bounds):
            return "an entropy to stop at"
        if sampling.noise is not None or (sampling.race is not None and not self._size.races):
            return "noise that is not made on the device"
        return None

    @torch.inference_mode()
    def decode(
        self, chunks: Sequence[Chunk], tables: Sequence[Sequence[int]], logits: Tensor, samplings: Sequence[Sampling]
    ) -> list[Decoded]:
        """Draws the tokens that follow chunks that have been run, and runs all of each sequence's but the last.

        Args:
            chunks: one of each sequence; there is room for its other tokens behind it.
            tables: the blocks of each.
            logits: `[S, V]`, of the last row of each.
            samplings: how the γ tokens of each are drawn; see `refusal`.

        Returns:
            Of each sequence, the tokens and how each came about.
        """
        table = next(each for each in self._tables if each.sequences >= len(chunks))
        table.fill(chunks, tables, logits, samplings)
        most = max(len(each.uniforms) for each in samplings)
        table.run(most - 1)
        return table.fetch(samplings)

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
                "races": Field(np.int64, (S,)),
                "race_seeds": Field(np.int64, (S,)),
                "race_positions": Field(np.int64, (S,)),
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
        self._gumbel_max = _gumbel_max() if size.races else None
        self._batch = PagedBatch(
            tokens=torch.zeros(S, dtype=torch.int64, device=eager.device),
            positions=torch.zeros(S, dtype=torch.int64, device=eager.device),
            places=torch.full((S,), eager.memory.nowhere, dtype=torch.int64, device=eager.device),
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
        samplings: Sequence[Sampling],
    ) -> None:
        """Puts in place what the first step begins with."""
        host = self._host
        for array in host.values():
            array[...] = 0
        for s, (chunk, blocks, sampling) in enumerate(zip(chunks, tables, samplings, strict=True)):
            count = len(sampling.uniforms)
            host["positions"][s] = chunk.start + len(chunk.tokens)
            host["limits"][s] = chunk.start + len(chunk.tokens) + count - 1
            host["bits"][:count, s] = [int(u * 2.0**53) for u in sampling.uniforms]
            if sampling.race is not None:
                host["races"][s] = 1
                host["race_seeds"][s], host["race_positions"][s] = _signed(sampling.race[0]), sampling.race[1]
            host["temperatures"][s] = sampling.law.temperature
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

    def fetch(self, samplings: Sequence[Sampling]) -> list[Decoded]:
        """Waits for what was drawn."""
        self._fetched.copy_(self._results)
        return [self._written(s, sampling) for s, sampling in enumerate(samplings)]

    def _written(self, s: int, sampling: Sampling) -> Decoded:
        count = len(sampling.uniforms)
        tokens: list[int] = self._told["tokens"][:count, s].tolist()
        if -1 in tokens:  # what follows was drawn from nothing
            del tokens[tokens.index(-1) + 1 :]
        if sampling.race is not None:
            return Decoded(tokens, [None] * len(tokens), [None] * len(tokens))
        if sampling.law.is_greedy:
            rows = self._logits[: len(tokens), s, : self._size.vocab_size].clone().unbind(0)
            scores = [row if token >= 0 else None for row, token in zip(rows, tokens, strict=True)]
            return Decoded(tokens, [None] * len(tokens), scores)
        ids, weights = self._told["ids"][: len(tokens), s], self._told["weights"][: len(tokens), s]
        return Decoded(tokens, list(map(_law_of, ids, weights)), [None] * len(tokens))

    # ------------------------------------------------------------------------------------------------------- captured

    def _step(self) -> None:
        self._draw()
        self._advance()

    def _draw(self) -> None:
        """A token of each sequence from the logits of this step."""
        step, V = self._put["step"].clamp(max=self._size.tokens - 1), self._size.vocab_size
        self._drawn_from.copy_(self._logits.index_select(0, step).squeeze(0))
        bits = self._put["bits"].index_select(0, step).squeeze(0)
        drawn = draw_static.draw(self._drawn_from[:, :V], self._put["temperatures"], bits, self._config)
        tokens = drawn.tokens
        if self._gumbel_max is not None:
            chosen = self._gumbel_max(
                self._drawn_from[:, :V], self._put["temperatures"], self._put["race_seeds"], self._put["race_positions"]
            )
            tokens = torch.where((self._put["races"] != 0) & (tokens >= 0), chosen, tokens)
            self._put["race_positions"].add_(1)
        for name, each in (("tokens", tokens), ("ids", drawn.ids), ("weights", drawn.weights)):
            self._got[name].index_copy_(0, step, each.unsqueeze(0))
        self._batch.tokens.copy_(tokens.clamp(min=0))

    def _advance(self) -> None:
        """Runs the tokens drawn; their logits are those of the next step."""
        batch, size = self._batch, self._size
        positions = self._put["positions"]
        is_own = positions < self._put["limits"]
        batch.positions.copy_(positions.clamp(max=size.max_length - 1))
        block = batch.tables.gather(1, (batch.positions // size.block_tokens).unsqueeze(1)).squeeze(1)
        place = block * size.block_tokens + batch.positions % size.block_tokens
        batch.places.copy_(torch.where(is_own, place, self._eager.memory.nowhere))
        batch.lengths.copy_(batch.positions + 1)
        logits = self._eager.program(batch.tokens, batch, None).to(self._logits.dtype)
        positions.add_(1)
        self._put["step"].add_(1)
        self._logits.index_copy_(0, self._put["step"].clamp(max=size.tokens - 1), logits.unsqueeze(0))


def _gumbel_max() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    from kernels.verify_triton import gumbel_max  # triton need not be installed where there are no races

    return gumbel_max


def _signed(seed: int) -> int:
    """A seed of 64 bits as int64 holds it."""
    return seed - 2**64 if seed >= 2**63 else seed


def _law_of(ids: np.ndarray, weights: np.ndarray) -> SparseLaw | None:
    """The law of a row of ids and weights, which have no more to say behind its support; None of one without."""
    size = int(np.count_nonzero(weights))
    if not size:
        return None
    return SparseLaw(ids[:size].copy(), weights[:size].astype(np.uint16), int(weights.sum(dtype=np.int64)))
