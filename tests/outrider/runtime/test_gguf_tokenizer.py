"""llama.cpp's own tokenizer, for GGUF files with a vocabulary of SentencePiece."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.runtime.llama_loader import load_gguf_tokenizer
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="the extra `llama` is not installed: make test-llama")
pytest.importorskip("llama_cpp", reason="the extra `llama` is not installed: make test-llama")

UNKNOWN, A = 0, 259


def sentencepiece(
    path: Path, *, add_space_prefix: bool | None, words: Sequence[str] = ("a", "\u2581", "\u2581a")
) -> Tokenizer:
    """The tokenizer of a GGUF file without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    writer.add_token_scores([0.0] * (259 + len(words)))
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, *[kinds.CONTROL] * 2, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(words)])
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_gguf_tokenizer(ModelSource(str(path)))


@pytest.mark.parametrize("add_space_prefix", [None, True, False])
def test_a_text_keeps_the_spaces_at_its_beginning(add_space_prefix: bool | None, tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "model.gguf", add_space_prefix=add_space_prefix)
    for text in ("a", " a", "  a a", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_unknown_token_is_a_special_one(tmp_path: Path) -> None:
    """As by the tokenizers of checkpoints."""
    tokenizer = sentencepiece(tmp_path / "model.gguf", add_space_prefix=None)
    assert tokenizer.decode([A, UNKNOWN, A]) == "aa"
    assert tokenizer.decode([A, UNKNOWN, A], skip_special=False) == "a<unk>a"


def test_a_text_may_have_more_tokens_than_bytes(tmp_path: Path) -> None:
    """Without a token of its own, a space is three of bytes."""
    tokenizer = sentencepiece(tmp_path / "model.gguf", add_space_prefix=False, words=("a",))
    assert len(tokenizer.encode(9 * " ", add_special=False)) == 27
