"""The second runtime: llama.cpp, by the low-level functions of llama-cpp-python.

`LlamaRunner` is a `ModelRunner`. Its pool is in `outrider.runtime.llama_pool`.
"""

import ctypes
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_decode_loop import LlamaBatchStruct, LlamaStruct, LoopArrays
from kernels.cpu_decoder import library as decoder_library
from kernels.sampling import NO_LOGITS, Sample
from outrider.runtime.batch import Chunk, last_rows
from outrider.runtime.block_pool import PoolExhausted
from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.llama_loader import Handle, LlamaModel, errors, library, no_text
from outrider.runtime.llama_pool import LlamaPool, SavedPrefixes
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.prefix_cache import PrefixCache

_MOST_SEQUENCES = 256  # of one context, in llama.cpp
# llama.cpp reuses the cells of a sequence behind its sliding window, which a rollback would need again, but no cell
# that two sequences share. So with a window each sequence has a second one beside it, of the same positions.
_BESIDE_WINDOW = 2
_CELLS = 256  # llama.cpp rounds the number of cells up to a multiple
_MICRO_BATCH = 512  # rows that llama.cpp computes at once
_LEAST_BATCH = 2048
_TILE = 64  # rows from which its flash attention computes, on a CPU, with the cells of other sequences too
_NO_SLOT = 1  # of llama_decode: too few cells


class LlamaRunner(ModelRunner):
    """A model of llama.cpp and its sequences. Only one thread may use it.

    Args:
        max_batch_tokens: the most rows of a pass.
        sequences: the most that hold positions at once; None: all that llama.cpp can hold. It goes through all of them
            in each pass: 256 take 0.13 ms.
        threads: of the CPU; None: as torch.

    Raises:
        CheckpointError: llama.cpp cannot allocate its memory, or runs such a model as one of embeddings or diffusion.
    """

    def __init__(
        self,
        loaded: LlamaModel,
        *,
        blocks: int,
        max_length: int,
        max_batch_tokens: int = _LEAST_BATCH,
        sequences: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._llama_cpp = llama_cpp = library()
        self._most_rows = max(max_batch_tokens, min(_LEAST_BATCH, max_length))
        copies = _copies(loaded)
        most = most_sequences(loaded)
        sequences = min(blocks, most if sequences is None else min(sequences, most))
        context = _context(llama_cpp, loaded, blocks * BLOCK_TOKENS, copies * sequences, self._most_rows, threads)
        self._context = context
        if llama_cpp.llama_get_memory(context) is None or not llama_cpp.llama_get_causal_attn(context):
            raise no_text(loaded.name)
        self._pool = LlamaPool(
            llama_cpp, context, loaded, sequences=sequences, blocks=blocks, max_length=max_length, copies=copies
        )
        self.loaded = loaded
        self.pool = self._pool
        self.max_length = min(max_length, loaded.context_length)
        self._batch = _Batch(llama_cpp, self._most_rows, copies * sequences, copies)

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        self.check(chunks)
        for chunk in chunks:
            self.pool.grow(chunk.slot, chunk.start + len(chunk.tokens))
        logits = self.run_pass(chunks)
        for chunk in chunks:
            self.pool.extend(chunk.slot, chunk.start + len(chunk.tokens))
        return logits

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        return self.forward(chunks).clone()

    def run_pass(self, chunks: Sequence[Chunk]) -> Tensor:
        """Runs chunks whose slots have the blocks; lengths of slots do not change. The next pass overwrites the result.

        Returns:
            `[R, V]`, float32, in the memory of llama.cpp.

        Raises:
            PoolExhausted: llama.cpp has too few cells.
        """
        rows = sum(len(chunk.tokens) for chunk in chunks)
        if rows > self._most_rows:
            raise ValueError(f"a pass of {rows} rows; {self._most_rows} at most are possible")
        calls = _calls(chunks)
        if len(calls) == 1:
            return self._call(chunks)
        found: dict[int, Tensor] = {}
        for call in calls:
            logits = self._call([chunks[i] for i in call]).clone()
            found |= zip(call, logits.split([len(chunks[i].tokens) - chunks[i].logits_from for i in call]), strict=True)
        return torch.cat([found[i] for i in range(len(chunks))])

    def _call(self, chunks: Sequence[Chunk]) -> Tensor:
        pool, rows = self._pool, sum(len(chunk.tokens) for chunk in chunks)
        for chunk in chunks:
            pool.truncate(chunk.slot, chunk.start)
        wanted = self._batch.fill(chunks, [pool.sequence(chunk.slot) for chunk in chunks])
        code = self._llama_cpp.llama_decode(self._context, self._batch.struct)
        for chunk in chunks:
            pool.wrote(chunk.slot, chunk.start + len(chunk.tokens))
        self._check_code(code, chunks, rows)
        if not wanted:
            return torch.empty(0, self.loaded.vocab_size)
        values = self._llama_cpp.llama_get_logits(self._context)
        logits = torch.from_numpy(np.ctypeslib.as_array(values, (wanted, self.loaded.vocab_size)))
        pool.holds_nan |= not _uses_flash_attention(self.loaded) and bool(logits.isnan().any())
        return logits

    def _check_code(self, code: int, chunks: Sequence[Chunk], rows: int) -> None:
        """Raises if `llama_decode` returned a code that is not 0; the slots then hold what they held before."""
        if not code:
            return
        for chunk in chunks:  # some of the rows may have run
            self._pool.truncate(chunk.slot, chunk.start)
        if code == _NO_SLOT:
            raise PoolExhausted(f"llama.cpp has too few cells for {rows} rows: {errors()}")
        raise RuntimeError(f"llama_decode returned {code} for {rows} rows: {errors()}")

    def prefix_cache(self, *, enabled: bool) -> PrefixCache:
        return SavedPrefixes(self._pool, enabled=enabled and self._pool.can_be_saved)

    def has_loop_in_c(self, sequences: int) -> bool:
        return sequences < _TILE and decoder_library() is not None and self._batch.fits_loop

    def run_loop(self, chunks: Sequence[Chunk], later_rows: Sequence[int], loop: LoopArrays) -> list[list[Sample]]:
        for chunk, later in zip(chunks, later_rows, strict=True):
            self.pool.grow(chunk.slot, chunk.start + len(chunk.tokens) + later)
        logits = self.run_pass(last_rows(chunks)).clone()
        if loop.is_draft:
            logits = torch.cat([logits, logits.new_empty(loop.rows_kept - len(chunks), logits.size(1))])
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        last = [Chunk(chunk.slot, [0], end - 1, 0) for chunk, end in zip(chunks, ends, strict=True)]
        self._batch.fill(last, [self._pool.sequence(chunk.slot) for chunk in chunks])
        struct = self._batch.loop_struct(self._context, logits, keeps_logits=loop.is_draft)
        decoder_library().decoder_loop_llama(ctypes.byref(struct), ctypes.byref(loop.struct))
        samples = loop.samples(logits)
        has_nan = any(own[-1].token == NO_LOGITS for own in samples)
        self._pool.holds_nan |= has_nan and not _uses_flash_attention(self.loaded)
        for chunk, end, own in zip(chunks, ends, samples, strict=True):
            self._pool.wrote(chunk.slot, end + len(own) - (struct.code == 0))  # the last one ran only if a pass failed
        self._check_code(struct.code, chunks, struct.batch.rows)
        return samples


def most_sequences(loaded: LlamaModel) -> int:
    """The most sequences of the model that hold positions at once."""
    return _MOST_SEQUENCES // _copies(loaded)


def _copies(loaded: LlamaModel) -> int:
    return _BESIDE_WINDOW if library().llama_model_n_swa(loaded.handle) else 1


def _uses_flash_attention(loaded: LoadedModel) -> bool:
    """Below `_TILE` rows it skips the cells of other sequences. Within it llama.cpp rounds more than float32 does."""
    return loaded.kv_dtype != torch.float32


def _calls(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Divides chunks between calls of llama.cpp: each has one sequence, or fewer rows than `_TILE`."""
    calls: list[list[int]] = []
    rows = _TILE
    for i in sorted(range(len(chunks)), key=lambda i: len(chunks[i].tokens)):
        rows += len(chunks[i].tokens)
        if rows >= _TILE:
            calls.append([])
            rows = len(chunks[i].tokens)
        calls[-1].append(i)
    return calls


def _context(
    llama_cpp: ModuleType, loaded: LlamaModel, cells: int, sequences: int, rows: int, threads: int | None
) -> Handle:
    parameters = llama_cpp.llama_context_default_params()
    types = {torch.float32: llama_cpp.GGML_TYPE_F32, torch.float16: llama_cpp.GGML_TYPE_F16}
    assert loaded.kv_dtype is not None
    parameters.n_ctx = -(-cells // _CELLS) * _CELLS
    parameters.n_batch, parameters.n_ubatch = rows, min(rows, _MICRO_BATCH)
    parameters.n_seq_max = sequences
    parameters.kv_unified = True
    parameters.swa_full = True  # else positions before a window are lost, and a rollback would need them
    parameters.n_threads = parameters.n_threads_batch = threads or torch.get_num_threads()
    parameters.type_k = parameters.type_v = types[loaded.kv_dtype]
    if not _uses_flash_attention(loaded):
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.no_perf = True
    errors()
    handle = llama_cpp.llama_init_from_model(loaded.handle, parameters)
    if not handle:
        raise CheckpointError(
            f"llama.cpp cannot allocate a context of {parameters.n_ctx} positions for '{loaded.name}': {errors()}; "
            "lower --kv-cache-mb or --max-sequences"
        )
    return Handle(handle, llama_cpp.llama_free, needed=loaded.handle)


class _Batch:
    """The arrays of a `llama_batch`, filled anew for each pass.

    Args:
        rows: the most of a pass.
        copies: see `LlamaPool`.

    Attributes:
        struct: the argument of `llama_decode`.
        fits_loop: whether this llama.cpp has the batch that the decode loop in C was written for.
    """

    def __init__(self, llama_cpp: ModuleType, rows: int, sequences: int, copies: int) -> None:
        self._llama_cpp = llama_cpp
        self.fits_loop = ctypes.sizeof(llama_cpp.llama_batch) == ctypes.sizeof(LlamaBatchStruct)
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._counts = np.full(rows, copies, np.int32)
        self._wanted = np.zeros(rows, np.int8)
        # The sequences of each row are those of one row of this table: each of ours, with its copies.
        table = np.arange(sequences, dtype=np.int32).reshape(copies, -1).T
        self._table = np.ascontiguousarray(table)
        self._pointers = np.zeros(rows, np.uintp)
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: Sequence[Chunk], sequences: Sequence[int]) -> int:
        """Returns the number of rows whose logits are wanted."""
        row = wanted = 0
        for chunk, sequence in zip(chunks, sequences, strict=True):
            count = len(chunk.tokens)
            end = row + count
            self._tokens[row:end] = chunk.tokens
            self._positions[row:end] = np.arange(chunk.start, chunk.start + count)
            self._pointers[row:end] = self._table.ctypes.data + self._table.strides[0] * sequence
            self._wanted[row:end] = 0
            self._wanted[row + chunk.logits_from : end] = 1
            wanted += count - chunk.logits_from
            row = end
        self.struct.n_tokens = row
        return wanted

    def loop_struct(self, context: Handle, logits: Tensor, *, keeps_logits: bool) -> LlamaStruct:
        """The argument of the decode loop in C, for a batch with one row of each sequence; see `LlamaStruct`."""
        functions = self._llama_cpp.llama_decode, self._llama_cpp.llama_get_logits
        return LlamaStruct(
            context._as_parameter_, *(ctypes.cast(each, ctypes.c_void_p) for each in functions),
            LlamaBatchStruct.from_buffer_copy(self.struct), logits.data_ptr(), logits.size(1), keeps_logits, 0,
        )  # fmt: skip
