"""The model runner of torch: a fused program where there is one, else the model of transformers."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_decode_loop import LoopArrays
from kernels.cpu_decoder import KEYS_TOGETHER, CPUDecoder
from kernels.sampling import Sample
from outrider.runtime.attention import Program, TransformersProgram, WantedRows
from outrider.runtime.batch import Chunk, PackedBatch, build_batch, pack
from outrider.runtime.cuda_graph import EagerRunner, GraphRunner
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import kv_dtype, sequence_blocks
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import ORDINARY, AttentionChoice
from outrider.runtime.sdpa import CausalMasks
from outrider.runtime.selfcheck import check_program, logits_tolerance, make_pool


class TorchRunner(ModelRunner):
    """A model of torch and its KV pool.

    Args:
        pool: with the layers of the model, and sequences no longer than its context.
        fuse: run a fused equivalent if there is one (`outrider.runtime.fused_decoder`).
        attention: the attention; paged if the pool is.

    Raises:
        ValueError: the pool does not fit the model or the attention.
        CheckpointError: the logits over a paged pool differ from those of transformers.
    """

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
        self.check(chunks)
        if self.paged_runner is not None:
            logits = self.paged_runner.run(build_batch(chunks, self.pool))
        else:
            tokens = chunks[0].tokens if len(chunks) == 1 else [token for chunk in chunks for token in chunk.tokens]
            logits = self.run_packed(tokens, self.pack(chunks), self._wanted_rows(chunks))
        for chunk in chunks:
            self.pool.extend(chunk.slot, chunk.start + len(chunk.tokens))
        return logits

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        logits = self.forward(chunks)
        return logits.to(torch.float32, copy=isinstance(self.paged_runner, GraphRunner))

    def has_loop_in_c(self, sequences: int) -> bool:
        return self._cpu_decoder is not None

    def run_loop(self, chunks: Sequence[Chunk], later_rows: Sequence[int], loop: LoopArrays) -> list[list[Sample]]:
        program = self.program
        assert isinstance(program, FusedDecoder)
        assert program.cpu_decoder is not None
        tokens = np.array([token for chunk in chunks for token in chunk.tokens], np.int64)
        batch = self.pack(chunks, later_rows)
        ends = [sum(each) for each in zip(batch.starts, batch.counts, later_rows, strict=True)]
        return program.cpu_decoder.run_loop(program.rows_in_c(torch.from_numpy(tokens), batch, ends), loop)

    def pack(self, chunks: Sequence[Chunk], later_rows: Sequence[int] = ()) -> PackedBatch:
        """The batch of these chunks over a pool that is not paged; `later_rows` of each slot get blocks too."""
        spans = ((chunk.slot, chunk.start, len(chunk.tokens)) for chunk in chunks)
        return pack(spans, self.pool, self.masks, later_rows=later_rows)

    def run_packed(self, tokens: Sequence[int], batch: PackedBatch, rows: WantedRows) -> Tensor:
        """Runs `tokens` `[T]` of a batch over a pool that is not paged; returns the logits of `rows` in float32."""
        token_ids = torch.from_numpy(np.array(tokens, np.int64))  # 15 µs faster than torch.tensor
        return self.program(token_ids.to(self.loaded.device), batch, rows).float()

    @property
    def _cpu_decoder(self) -> CPUDecoder | None:
        return self.program.cpu_decoder if isinstance(self.program, FusedDecoder) else None

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
