"""Converts text to tokens and back: encoding, chat templates, and incremental decoding."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.runtime.checkpoint import resolve_folder
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import ModelSource

# The names that templates get from the service or from transformers, and the parameters of transformers' functions.
RESERVED_ARGUMENTS = frozenset({"messages"}).union(
    PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    inspect.signature(render_jinja_template).parameters,
)
# A template rejects its messages, or one of its operations fails.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_BROKEN = "\ufffd"  # decoders write it for invalid bytes, and for an incomplete character


class ChatTemplateError(ValueError):
    """There is no chat template, or it rejects the messages."""


def load_tokenizer(source: ModelSource) -> "Tokenizer":
    """Loads the tokenizer from the folder of a model.

    Raises:
        CheckpointError: there is none, or it cannot be read; the text is one line.
    """
    folder = resolve_folder(source.name, source.revision, weights=False, code=source.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        raise CheckpointError(f"cannot load the tokenizer of '{source.name}': {error}") from error
    return Tokenizer(tokenizer)


class Tokenizer:
    """A tokenizer of transformers. Its methods may be called from any thread.

    Args:
        tokenizer: as `AutoTokenizer` loads it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Without transformers' wrapper, unless the class overrides `_decode`: a tenth of the time for a few tokens.
        plain = isinstance(tokenizer, TokenizersBackend) and type(tokenizer)._decode is TokenizersBackend._decode
        self._decode = tokenizer.backend_tokenizer.decode if plain else self._decode_slowly
        # A token with text, decoded before another token. The first call of `encode` also sets padding and truncation
        # in the library, which is not safe while other threads use it.
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False))[-1:]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special`: with the special tokens that the tokenizer adds by default."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special, verbose=False))

    def to_json(self) -> str | None:
        """The content of its `tokenizer.json`; None for a tokenizer in Python."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    @property
    def class_name(self) -> str:
        """Its class in transformers."""
        return type(self._tokenizer).__name__

    @property
    def chat_template(self) -> str:
        """The chat template that `encode_chat` uses; empty if there is none."""
        if not self.has_chat_template:
            return ""
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError:  # several templates, none of them the default
            return ""

    def special_tokens(self) -> list[tuple[str, str, int]]:
        """Role, text and id of the special tokens that have a role; roles are named as in transformers."""
        found = [*self._tokenizer.special_tokens_map.items()]
        found += [("extra_special_tokens", text) for text in self._tokenizer.extra_special_tokens]
        return [(name, text, int(self._tokenizer.convert_tokens_to_ids(text))) for name, text in found]

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template, which `encode_chat` needs."""
        return bool(self._tokenizer.chat_template)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation by the chat template, up to the beginning of the next answer.

        Args:
            messages: with `role` and `content`, and what else the template reads, oldest first.
            arguments: variables of the template; none of `RESERVED_ARGUMENTS`.

        Raises:
            ChatTemplateError: there is no template, or it rejects these messages.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("the tokenizer has no chat template: give the prompt as text or as token ids")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(each) for each in messages], add_generation_prompt=True, tokenize=False, **arguments or {}
            )
        except TEMPLATE_ERRORS as error:
            raise ChatTemplateError(str(error)) from error
        return self.encode(text, add_special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of tokens, without cleaning up spaces. Ids without a token have no text."""
        return str(self._decode(list(ids), skip_special_tokens=skip_special))

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        """The text of one token after other tokens, with its leading space."""
        anchor = self._anchor
        return self.decode([*anchor, token], skip_special)[len(self.decode(anchor, skip_special)) :]

    def vocabulary(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most UTF-8 bytes of text of one token."""
        # A token's entry in the vocabulary has at least as many bytes as its text. So the search can stop at entries
        # that are not longer than the longest text so far.
        spellings = sorted(((len(token.encode()), number) for token, number in self.vocabulary().items()), reverse=True)
        longest = 1
        for spelling, number in spellings:
            if spelling <= longest:
                break
            longest = max(longest, len(self.decode_token(number, skip_special=False).encode()))
        return longest

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the map from token to id, added tokens included.

        Tokenizers with the same fingerprint have the same token for each id. They may split text differently.
        """
        digest = hashlib.sha256()
        for token, index in sorted(self.vocabulary().items()):
            for part in (token.encode("utf-8", "surrogatepass"), str(index).encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token of the tokenizer, if it has one."""
        found = self._tokenizer.eos_token_id
        return () if found is None else (int(found),)

    def _decode_slowly(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class IncrementalDetokenizer:
    """Decodes token by token. The returned parts together are the text of all tokens decoded at once.

    The text of a token depends on the tokens before it: a first token loses its leading space, and a character may span
    several tokens. So each call decodes the new token together with the tokens of the last complete characters, and
    returns the added text. An incomplete character is kept until it is complete, or can no longer become complete.

    One case differs from decoding at once. Tokenizers with byte fallback decode a run of byte tokens as a whole: one
    invalid byte turns the whole run into U+FFFD, even the characters that were returned before that byte.

    `tokenizers.decoders.DecodeStream` is no replacement: it needs a Rust tokenizer, raises at that invalid byte,
    returns text of the prompt if the prompt ends inside a character, and returns nothing more after U+FFFD. Tests show
    each case.

    Args:
        prompt_ids: the tokens before; their text is not returned.
        skip_special: special tokens have no text.

    Attributes:
        pending: whether an incomplete character is kept.
        kept: the characters, all U+FFFD, that `flush` would return.
    """

    _LONGEST = 64  # after so many tokens without a complete character, do not wait for one any longer
    _FAR = 1024  # tokens at the end of the prompt in which to search for one that begins with a character

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tokens: list[int] = []
        self._context = 0  # how many of the tokens precede the incomplete character
        self._returned = 0  # how many characters of their text were returned
        self._prompt_end = ""  # the text of the tokens when the prompt ended inside a character
        self.pending = False
        self.kept = 0
        for token in self._tail(prompt_ids):
            self.push(token)
        if self.pending:
            self._prompt_end, self.pending, self.kept = self._decode(self._tokens), False, 0

    def push(self, token: int) -> str:
        """The text that this token completes, in whole characters."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        complete = text.rstrip(_BROKEN)
        self.pending = complete != text
        is_stuck = self.pending and len(self._tokens) - self._context > self._LONGEST
        if is_stuck:
            complete = text[:-1]  # so many bytes cannot be one character: only the last one can still become complete
        new = self._return(complete)
        self.kept = max(0, len(text) - self._begin(text)) if self.pending else 0
        if is_stuck:
            self._restart(self._tokens[-4:])
        elif not self.pending:
            self._restart(self._tokens[self._context :])
        return new

    def flush(self) -> str:
        """The rest of the text, at the end: U+FFFD for an incomplete character."""
        if not self.pending:
            return ""
        self.pending, self.kept = False, 0
        return self._return(self._decode(self._tokens))

    def _return(self, text: str) -> str:
        begin = self._begin(text)
        self._returned = max(begin, len(text))
        return text[begin:]

    def _begin(self, text: str) -> int:
        """Where the part begins that was not returned. Of the prompt's end only the last character may still change."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, self._prompt_end, strict=False))
        return max(self._returned, sum(1 for _ in same))

    def _restart(self, tokens: list[int]) -> None:
        """Continues with the tokens of the last characters as context. Tokens without text are no context."""
        text = self._decode(tokens)
        if text:
            self._tokens, self._prompt_end = tokens, ""
            self._context = 0 if self.pending else len(tokens)
            self._returned = len(text) - self.pending
        elif len(tokens) > self._LONGEST:
            del self._tokens[self._context :]

    def _tail(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The end of the prompt, from the last token that begins with a character."""
        far = max(0, len(prompt_ids) - self._FAR)
        for start in range(len(prompt_ids) - 1, far, -1):
            text = self._decode(prompt_ids[start : start + 1])
            if text and not text.startswith(_BROKEN):
                return prompt_ids[start:]
        return prompt_ids[far:]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
