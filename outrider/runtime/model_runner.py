"""The model runner: chunks of many sequences in one forward pass over a KV pool."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_decode_loop import LoopArrays
from kernels.cpu_decoder import KEYS_TOGETHER, CPUDecoder
from kernels.sampling import Sample
from outrider.runtime.attention import Program, TransformersProgram, WantedRows
from outrider.runtime.batch import Chunk, PackedBatch, build_batch, pack
from outrider.runtime.cuda_graph import Capturer, EagerRunner, GraphRunner, Runner, buckets_for
from outrider.runtime.encoder_decoder import encoder_length
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.layer_ops import LayerOps
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import kv_dtype, sequence_blocks
from outrider.runtime.paged_attention import ORDINARY, AttentionChoice
from outrider.runtime.sdpa import CausalMasks
from outrider.runtime.selfcheck import check_program, logits_tolerance, make_pool

__all__ = ["Chunk", "ModelRunner", "Steps"]


class Steps(ABC):
    """The passes of a decode loop: a chunk of each sequence, then one token of each that goes on.

    No pass changes the length of a slot. `first` comes before `next`. Later passes do not overwrite logits.
    """

    @abstractmethod
    def first(self) -> Tensor:
        """Runs the chunks; returns the logits `[B, V]` of their last rows."""

    @abstractmethod
    def next(self, going: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Runs one token of each sequence that goes on; returns their logits `[len(going), V]`.

        Args:
            going: indices in the pass before.
            tokens: of these sequences.
        """


class _PackedSteps(Steps):
    """The steps over a pool that is not paged."""

    def __init__(self, model_runner: "ModelRunner", chunks: Sequence[Chunk], later_rows: Sequence[int]) -> None:
        self._model_runner = model_runner
        self._tokens = [token for chunk in chunks for token in chunk.tokens]
        self._batch = model_runner.pack(chunks, later_rows)
        self._last = torch.tensor(self._batch.counts, device=model_runner.loaded.device).cumsum(0) - 1

    def first(self) -> Tensor:
        return self._model_runner.run_packed(self._tokens, self._batch, self._last)

    def next(self, going: Sequence[int], tokens: Sequence[int]) -> Tensor:
        self._batch = self._batch.next_rows(going)
        return self._model_runner.run_packed(tokens, self._batch, None)


class ModelRunner:
    """A model and its KV pool. Only one thread may use it.

    A second runtime derives from it (`outrider.runtime.llama_cpp`): it overrides `forward`, `logits`, `steps` and the
    loop in C, and brings a `KVPool` of its own.

    Args:
        pool: with the layers of the model, and sequences no longer than its context.
        fuse: run a fused equivalent if there is one (`outrider.runtime.fused_decoder`).
        attention: the attention; paged if the pool is.

    Attributes:
        paged_runner: of batches over a paged pool; else None.
        layer_choice: the operations of a fused model over a paged pool, for the log; else None.

    Raises:
        ValueError: the pool does not fit the model or the attention.
        CheckpointError: the logits over a paged pool differ from those of transformers.
    """

    attention: AttentionChoice = ORDINARY
    paged_runner: Runner | None = None
    layer_choice: LayerOps | None = None

    def __init__(
        self, loaded: LoadedModel, pool: KVPool, *, fuse: bool = True, attention: AttentionChoice = ORDINARY
    ) -> None:
        longest = max(loaded.context_length, 0 if loaded.encoder is None else loaded.encoder.info.max_length)
        if pool.max_length > longest:
            raise ValueError(f"max_length is {pool.max_length}; the context of {loaded.name} has {longest} positions")
        if loaded.encoder is not None and attention.is_paged:
            raise ValueError(f"{loaded.name} has an encoder, and the attention is {attention.name}; it must be sdpa")
        self.max_length = min(pool.max_length, loaded.context_length)
        if pool.layers != len(loaded.layers):
            raise ValueError(f"the pool has {pool.layers} layers; {loaded.name} has {len(loaded.layers)}")
        if not fuse and loaded.fused is not None:
            raise ValueError(
                f"fuse is False, but {loaded.name} is fused already, and its own weights are gone: load it again"
            )
        self.loaded = loaded
        self.pool = pool
        self.program: Program = loaded.encoder or TransformersProgram(loaded.model)
        if fuse:
            self.program = fuse_model(loaded, paged=pool.paged is not None)
        if self._cpu_decoder is not None and pool.block_tokens % KEYS_TOGETHER:
            raise ValueError(f"block_tokens is {pool.block_tokens}; it must be a multiple of {KEYS_TOGETHER}")
        self.masks = CausalMasks(pool.max_length, pool.dtype, pool.device)
        if attention.is_paged != (pool.paged is not None):
            raise ValueError(f"the attention is {attention.name}, but the pool is {'' if pool.paged else 'not '}paged")
        self.attention = attention
        if pool.paged is not None:
            if isinstance(self.program, FusedDecoder):
                self.layer_choice = self.program.choose_layers(pool.dtype)
            self._check_paged()
            self.paged_runner = EagerRunner(
                self.program, pool.paged, attention.attend, loaded.device, loaded.dtype, pool.max_length
            )

    @classmethod
    def build(
        cls,
        loaded: LoadedModel,
        max_sequences: int,
        max_length: int,
        *,
        blocks: int | None = None,
        fuse: bool = True,
        attention: AttentionChoice = ORDINARY,
    ) -> Self:
        """With a new pool of `blocks` blocks; None is enough for `max_sequences` of `max_length`."""
        if blocks is None:
            blocks = max_sequences * sequence_blocks(loaded, max_length, attention.block_tokens)
        if loaded.encoder is not None:
            max_length = max(max_length, loaded.encoder.info.max_length)
        pool = make_pool(
            loaded.layers,
            blocks=blocks,
            max_length=max_length,
            dtype=kv_dtype(loaded),
            device=loaded.device,
            block_tokens=attention.block_tokens,
            paged=attention.is_paged,
        )
        return cls(loaded, pool, fuse=fuse, attention=attention)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Runs one forward pass; afterwards each slot holds `start + len(tokens)` positions.

        If it raises, no slot has changed its length. On a GPU it may return before the pass ends.

        Args:
            chunks: of different slots.

        Returns:
            `[R, V]`: logits of the rows from `logits_from` on, in the order of the chunks. With a paged pool they are
            in the dtype of the model, and the next pass may overwrite them; else they are float32.

        Raises:
            ValueError: a chunk does not fit its slot, or a token is outside the vocabulary.
            PoolExhausted: the pool has too few free blocks (`KVPool.blocks_needed`).
        """
        self.check(chunks)
        if self.paged_runner is not None:
            logits = self.paged_runner.run(build_batch(chunks, self.pool))
        else:
            tokens = chunks[0].tokens if len(chunks) == 1 else [token for chunk in chunks for token in chunk.tokens]
            logits = self.run_packed(tokens, self.pack(chunks), self._wanted_rows(chunks))
        for chunk in chunks:
            self.pool.extend(chunk.slot, chunk.start + len(chunk.tokens))
        return logits

    def steps(self, chunks: Sequence[Chunk], later_rows: Sequence[int]) -> Steps:
        """The passes of a decode loop over a pool that is not paged. Each slot takes blocks for all its rows at once.

        Args:
            chunks: of different slots.
            later_rows: rows of each slot after its chunk.

        Raises:
            PoolExhausted: the pool has too few free blocks.
        """
        return _PackedSteps(self, chunks, later_rows)

    def encode(self, slot: int, inputs: Tensor) -> None:
        """Runs the encoder of a sequence. It must come before the first `forward` of the slot.

        Args:
            slot: of the decoder; may have an empty encoder already (`KVPool.add_encoder`).
            inputs: token ids `[S]`, or log-Mel features `[mels, frames]`.

        Raises:
            PoolExhausted: the pool has too few free blocks.
        """
        encoder = self.loaded.encoder
        assert encoder is not None
        encoder_slot = self.pool.encoder_slot(slot)
        if encoder_slot is None:
            encoder_slot = self.pool.add_encoder(slot, encoder_length(inputs))
        encoder.fill(self.pool, encoder_slot, inputs)

    def lacks_encoder(self, slot: int) -> bool:
        """Whether `encode` must run before `forward`."""
        return self.loaded.encoder is not None and self.pool.lacks_encoder(slot)

    def allocate_for_trial(self) -> int:
        """Returns an empty slot, on which `forward` can run at once."""
        slot = self.pool.allocate()
        if self.loaded.encoder is not None:
            self.encode(slot, self.loaded.encoder.smallest())
        return slot

    def pack(self, chunks: Sequence[Chunk], later_rows: Sequence[int] = ()) -> PackedBatch:
        """The batch of these chunks over a pool that is not paged; `later_rows` of each slot get blocks too."""
        spans = ((chunk.slot, chunk.start, len(chunk.tokens)) for chunk in chunks)
        return pack(spans, self.pool, self.masks, later_rows=later_rows)

    def run_packed(self, tokens: Sequence[int], batch: PackedBatch, rows: WantedRows) -> Tensor:
        """Runs `tokens` `[T]` of a batch over a pool that is not paged; returns the logits of `rows` in float32."""
        token_ids = torch.from_numpy(np.array(tokens, np.int64))  # 15 µs faster than torch.tensor
        return self.program(token_ids.to(self.loaded.device), batch, rows).float()

    def has_loop_in_c(self, sequences: int) -> bool:
        """Whether `run_loop` runs this model, for so many sequences."""
        return self._cpu_decoder is not None

    @property
    def _cpu_decoder(self) -> CPUDecoder | None:
        return self.program.cpu_decoder if isinstance(self.program, FusedDecoder) else None

    def run_loop(self, chunks: Sequence[Chunk], later_rows: Sequence[int], loop: LoopArrays) -> list[list[Sample]]:
        """Runs chunks, draws a token of each sequence, runs those tokens, and so on, in C. Lengths do not change.

        Args:
            chunks: as for `forward`; the logits of their last rows are drawn from.
            later_rows: of each sequence, the most tokens that are run after its chunk.

        Returns:
            The samples of each sequence.

        Raises:
            PoolExhausted: the pool has too few free blocks.
        """
        program = self.program
        assert isinstance(program, FusedDecoder)
        assert program.cpu_decoder is not None
        tokens = np.array([token for chunk in chunks for token in chunk.tokens], np.int64)
        batch = self.pack(chunks, later_rows)
        ends = [sum(each) for each in zip(batch.starts, batch.counts, later_rows, strict=True)]
        return program.cpu_decoder.run_loop(program.rows_in_c(torch.from_numpy(tokens), batch, ends), loop)

    def capture(
        self,
        capturer: Capturer,
        *,
        max_sequences: int,
        widest: int,
        seconds: float,
        most_bytes: int,
        max_batch_tokens: int | None = None,
    ) -> str:
        """Captures CUDA graphs of frequent batch sizes, if the pool is paged.

        Args:
            widest: the most rows of one sequence.
            seconds, most_bytes: see `GraphRunner.capture`.
            max_batch_tokens: the most rows of a batch; None is no limit.

        Returns:
            One line for the log.
        """
        if not isinstance(self.paged_runner, EagerRunner):
            return "none: the KV cache is not paged"
        captured = GraphRunner(
            self.paged_runner,
            block_tokens=self.pool.block_tokens,
            vocab_size=self.loaded.vocab_size,
            max_sequences=max_sequences,
        )
        buckets = buckets_for(max_sequences, min(widest, self.pool.max_length), max_batch_tokens=max_batch_tokens)
        summary = captured.capture(capturer, buckets, seconds=seconds, most_bytes=most_bytes)
        self.paged_runner = captured
        return summary

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """As `forward`, in float32; the next pass does not overwrite the result."""
        logits = self.forward(chunks)
        return logits.to(torch.float32, copy=isinstance(self.paged_runner, GraphRunner))

    def warm_up(self, widths: Iterable[int]) -> None:
        """Runs each width (in tokens) once: the first pass of a width is several times slower than the next."""
        for width in widths:
            if 2 * width <= self.max_length:
                slot = self.allocate_for_trial()
                try:
                    self.forward([Chunk(slot, [0] * width, 0, 0)])
                    self.forward([Chunk(slot, [0] * width, width, 0)])
                finally:
                    self.pool.free(slot)

    def _check_paged(self) -> None:
        """Checks the logits over a paged pool against transformers, on the device."""
        loaded, size = self.loaded, self.pool.block_tokens
        why = check_program(
            self.program, loaded.layers, loaded.reference, self.pool.dtype, loaded.device,
            logits_tolerance(loaded.dtype, quantised=loaded.quantisation is not None),
            attention=self.attention.attend, block_tokens=size,
        )  # fmt: skip
        if why:
            raise CheckpointError(
                f"{loaded.name} with --attention {self.attention.name} gives other logits than transformers: {why}; "
                "use --attention sdpa"
            ) from why.cause

    def _wanted_rows(self, chunks: Sequence[Chunk]) -> WantedRows:
        if len(chunks) == 1:
            wanted = len(chunks[0].tokens) - chunks[0].logits_from
            if wanted == len(chunks[0].tokens):
                return None
            if wanted:
                return wanted
        rows: list[int] = []
        first = 0
        for chunk in chunks:
            rows.extend(range(first + chunk.logits_from, first + len(chunk.tokens)))
            first += len(chunk.tokens)
        return None if len(rows) == first else torch.tensor(rows, dtype=torch.int64, device=self.loaded.device)

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raises `ValueError` for chunks that `forward` would refuse."""
        if not chunks:
            raise ValueError("chunks is empty; a pass needs at least one")
        if len(chunks) > 1 and len({chunk.slot for chunk in chunks}) < len(chunks):
            raise ValueError(f"a slot appears twice in one pass: slots {sorted(chunk.slot for chunk in chunks)}")
        for chunk in chunks:
            held, count = self.pool.length(chunk.slot), len(chunk.tokens)
            if not count:
                raise ValueError(f"the chunk of slot {chunk.slot} has no tokens")
            if chunk.start != held:
                raise ValueError(
                    f"the chunk of slot {chunk.slot} starts at {chunk.start}; the slot holds {held} positions"
                )
            if held + count > self.max_length:
                raise ValueError(
                    f"slot {chunk.slot} holds {held} positions and gets {count} more; the limit is {self.max_length}"
                )
            if self.lacks_encoder(chunk.slot):
                raise ValueError(f"the encoder of slot {chunk.slot} has not run")
            if not 0 <= chunk.logits_from <= count:
                raise ValueError(f"logits_from of slot {chunk.slot} is {chunk.logits_from}, outside 0 to {count}")
            if min(chunk.tokens) < 0 or max(chunk.tokens) >= self.loaded.vocab_size:
                wrong = next(token for token in chunk.tokens if not 0 <= token < self.loaded.vocab_size)
                raise ValueError(f"token {wrong} of slot {chunk.slot} is outside 0 to {self.loaded.vocab_size - 1}")
