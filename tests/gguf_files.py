"""GGUF files for tests, made from checkpoints by `outrider convert`."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer{{ mood }}]"
TEXTS = ("the hat", " then and than ", "a<tool>b<end>", "thethe  the\n\nend", "", "é漢 🙂")


def write_gguf(folder: Path, kind: str = "f32") -> Path:
    """Write the GGUF file of a checkpoint with a tokenizer, once, and return its path."""
    from outrider.runtime.gguf_convert import convert

    path = folder / f"{kind}.gguf"
    if not path.exists():
        convert(str(folder), path, kind)
    return path


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
