"""The tokenizer of a GGUF file: that of its checkpoint if the file has it whole, else llama.cpp's."""

import ctypes
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.runtime.errors import CheckpointError
from outrider.runtime.tokenizer import TEMPLATE_ERRORS, ChatTemplateError, Tokenizer

_ROLES = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("extra_special_tokens", "additional_special_tokens"),
)


def gguf_tokenizer(llama_cpp: ModuleType, model: Any, metadata: dict[str, Any], name: str) -> Tokenizer:
    """That of the checkpoint if the file has it whole; else llama.cpp's.

    Raises:
        CheckpointError: the file has none, or it cannot be read.
    """
    whole = metadata.get("tokenizer.huggingface.json")
    if whole is None:
        return LlamaTokenizer(llama_cpp, model, metadata, name)
    try:
        options = json.loads(metadata.get("outrider.tokenizer_config", "{}"))
        roles = {role: options[role] for role in _ROLES if options.get(role) is not None}
        roles = PreTrainedTokenizerFast.convert_added_tokens(roles)  # old checkpoints have dictionaries
        found = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(whole), **roles)
    except Exception as error:  # tokenizers raises no other type
        raise CheckpointError(f"cannot read the tokenizer in '{name}': {error}") from error
    found.chat_template = metadata.get("tokenizer.chat_template")
    return Tokenizer(found)


class LlamaTokenizer(Tokenizer):
    """The tokenizer of llama.cpp, for a GGUF file without that of its checkpoint.

    Raises:
        CheckpointError: the file has no vocabulary.
    """

    def __init__(self, llama_cpp: ModuleType, model: Any, metadata: dict[str, Any], name: str) -> None:
        self._llama_cpp, self._model = llama_cpp, model  # which must outlive its vocabulary
        self._vocab = vocab = llama_cpp.llama_model_get_vocab(model)
        if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise CheckpointError(f"'{name}' has no tokenizer: its vocabulary is empty")
        self._template = metadata.get("tokenizer.chat_template") or ""
        count = llama_cpp.llama_vocab_n_tokens(vocab)
        self._texts = [
            llama_cpp.llama_vocab_get_text(vocab, token).decode("utf-8", "replace") for token in range(count)
        ]
        special = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        self._is_special = [bool(llama_cpp.llama_vocab_get_attr(vocab, token) & special) for token in range(count)]
        self._bytes = [self._piece(token) for token in range(count)]
        is_spm = llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_SPM
        self._strips = is_spm and metadata.get("tokenizer.ggml.add_space_prefix", True)
        self._anchor = self.encode("a", add_special=False)[-1:]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self._llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, True)
            if count >= 0:
                return list(ids[:count])
            room = -count  # a space may be three tokens, and normalisation may lengthen a text

    @property
    def class_name(self) -> str:
        return type(self).__name__

    @property
    def chat_template(self) -> str:
        return str(self._template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template)

    def special_tokens(self) -> list[tuple[str, str, int]]:
        roles = {"bos_token": self._llama_cpp.llama_vocab_bos, "eos_token": self._llama_cpp.llama_vocab_eos}
        found = [(role, int(find(self._vocab))) for role, find in roles.items()]
        return [(role, self._texts[token], token) for role, token in found if token >= 0]

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        if not self.has_chat_template:
            raise ChatTemplateError("the GGUF file has no chat template: give the prompt as text or as token ids")
        tokens = {role: text for role, text, _ in self.special_tokens()}
        try:
            texts, _ = render_jinja_template(
                [[dict(each) for each in messages]], chat_template=self._template, add_generation_prompt=True,
                **tokens | dict(arguments or {}),
            )  # fmt: skip
        except TEMPLATE_ERRORS as error:
            raise ChatTemplateError(str(error)) from error
        return self.encode(texts[0], add_special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        parts = [
            self._bytes[token]
            for token in ids
            if 0 <= token < len(self._bytes) and not (skip_special and self._is_special[token])
        ]
        text = b"".join(parts).decode("utf-8", "replace")
        return text[1:] if self._strips and text.startswith(" ") else text

    def vocabulary(self) -> dict[str, int]:
        unused = self._llama_cpp.LLAMA_TOKEN_ATTR_UNUSED
        attribute = self._llama_cpp.llama_vocab_get_attr
        return {text: token for token, text in enumerate(self._texts) if not attribute(self._vocab, token) & unused}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        token = int(self._llama_cpp.llama_vocab_eos(self._vocab))
        return () if token < 0 else (token,)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = self._llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = self._llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:size]
