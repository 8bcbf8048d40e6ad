"""The interface of a model runner: chunks of many sequences in one forward pass over a KV pool.

There are two: `outrider.runtime.torch_runner` and `outrider.runtime.llama_cpp`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from kernels.cpu_decode_loop import LoopArrays
from kernels.sampling import Sample
from outrider.runtime.batch import Chunk
from outrider.runtime.cuda_graph import Capturer, EagerRunner, GraphRunner, Runner, buckets_for
from outrider.runtime.encoder_decoder import encoder_length
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.layer_ops import LayerOps
from outrider.runtime.loader import LoadedModel
from outrider.runtime.paged_attention import ORDINARY, AttentionChoice
from outrider.runtime.prefix_cache import PrefixCache

__all__ = ["Chunk", "ModelRunner"]


class ModelRunner(ABC):
    """A model and its KV pool. Only one thread may use it.

    Attributes:
        max_length: the most positions of a sequence.
        paged_runner: of batches over a paged pool; else None.
        layer_choice: the operations of a fused model over a paged pool, for the log; else None.
    """

    loaded: LoadedModel
    pool: KVPool
    max_length: int
    attention: AttentionChoice = ORDINARY
    paged_runner: Runner | None = None
    layer_choice: LayerOps | None = None

    @abstractmethod
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

    @abstractmethod
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """As `forward`, in float32; the next pass does not overwrite the result."""

    @abstractmethod
    def has_loop_in_c(self, sequences: int) -> bool:
        """Whether `run_loop` runs this model, for so many sequences."""

    @abstractmethod
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

    def prefix_cache(self, *, enabled: bool) -> PrefixCache:
        """The prefix cache of the pool. It stays empty if it is not `enabled`, or if prefixes cannot be cached."""
        # With an encoder, keys and values of a prefix depend on its input too.
        return PrefixCache(self.pool, enabled=enabled and self.loaded.encoder is None)

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
        captured = GraphRunner(self.paged_runner, vocab_size=self.loaded.vocab_size, max_sequences=max_sequences)
        buckets = buckets_for(max_sequences, min(widest, self.pool.max_length), max_batch_tokens=max_batch_tokens)
        summary = captured.capture(capturer, buckets, seconds=seconds, most_bytes=most_bytes)
        self.paged_runner = captured
        return summary

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
