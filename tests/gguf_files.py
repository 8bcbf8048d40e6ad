"""GGUF files for tests, made from checkpoints by `outrider convert`, and the models that they are made of."""

from collections.abc import Callable
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from outrider.runtime.llama_cpp import LlamaRunner
from outrider.runtime.llama_loader import load_gguf
from outrider.runtime.loader import ModelSource
from tests.outrider.runtime import tiny
from tests.outrider.runtime.steps import MAX_LENGTH
from tests.outrider.runtime.tiny import SHAPE, WINDOW

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer{{ mood }}]"
TEXTS = ("the hat", " then and than ", "a<tool>b<end>", "thethe  the\n\nend", "", "é漢 🙂")
# llama.cpp scales the queries of Gemma 3 by the size of a head.
GEMMA3 = transformers.Gemma3TextConfig(
    **SHAPE,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    **{name: tiny.FAMILIES[name] for name in ("llama", "llama-tied-mqa", "qwen2", "qwen3", "mistral", "gpt2")},
    "gemma3": lambda: GEMMA3,
}


def write_gguf(folder: Path, kind: str = "f32") -> Path:
    """Write the GGUF file of a checkpoint with a tokenizer, once, and return its path."""
    from outrider.runtime.gguf_convert import convert

    path = folder / f"{kind}.gguf"
    if not path.exists():
        convert(str(folder), path, kind)
    return path


def build(path: Path, *, sequences: int = 8, length: int = MAX_LENGTH) -> LlamaRunner:
    """Load a GGUF file, with blocks for so many sequences at their longest."""
    loaded, _ = load_gguf(ModelSource(str(path), device="cpu"))
    return LlamaRunner(loaded, blocks=sequences * -(-length // 32), max_length=length, threads=1)


def save_tokenizer(folder: Path, size: int, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Save a byte-level tokenizer of `size` tokens, some of them merged, into a checkpoint; return it."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())][: size - 8]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n")]
    letters = [*dict.fromkeys([*"thean Ġ".replace(" ", ""), *letters])][: size - 8]
    words = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.add_tokens(["<tool>"])
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>")
    found.chat_template = chat_template
    found.save_pretrained(folder)
    return found
