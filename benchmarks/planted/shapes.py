"""The shapes of models: how large each of their parts is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder in Llama's layout.

    Attributes:
        name: how it is called here.
        hidden: size of the residual stream.
        layers: how many.
        heads: query heads.
        kv_heads: heads of keys and values.
        mlp: inner size of the MLP.
        vocab: V.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    def config(self) -> dict[str, Any]:
        """Arguments of `LlamaConfig`. Embedding and head are apart: a planted head is another matrix."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    @property
    def weights_read(self) -> int:
        """Parameters that a pass over one token reads: all of them, but of the embedding one row."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + self.hidden + self.hidden * self.vocab + self.hidden

    @property
    def kv_values(self) -> int:
        """Keys and values of one position, over all layers."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


LLAMA_1B = Shape("1B", hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192, vocab=128_256)
LLAMA_8B = Shape("8B", hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, vocab=128_256)
LLAMA_13B = Shape("13B", hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13_824, vocab=32_000)

TINY_DRAFT = Shape("tiny draft", hidden=64, layers=1, heads=2, kv_heads=1, mlp=96, vocab=1024)
TINY_TARGET = Shape("tiny target", hidden=128, layers=2, heads=4, kv_heads=2, mlp=192, vocab=1024)
