"""Text to tokens and back: encoding, chat templates, and text that comes out as tokens come in."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import ModelSource, resolve_folder

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one


class ChatTemplateError(ValueError):
    """There is no chat template, or it refuses the messages."""


def load_tokenizer(source: ModelSource) -> "Tokenizer":
    """The tokenizer that lies beside a model.

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
        # Straight to the library where nothing stands between: a tenth of the time for the few tokens of a round.
        plain = isinstance(tokenizer, TokenizersBackend) and type(tokenizer)._decode is TokenizersBackend._decode
        self._decode = tokenizer.backend_tokenizer.decode if plain else self._decode_slowly
        # A token with text of its own, to stand before another. The first call also settles how the library pads and
        # cuts, which it must not change while other threads use it.
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False))[-1:]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds by default."""
        return list(self._tokenizer.encode(text, verbose=False))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(self._tokenizer.chat_template)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation by the tokenizer's chat template, up to where the next answer begins.

        Args:
            messages: (role, content), oldest first.

        Raises:
            ChatTemplateError: there is no template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("the tokenizer has no chat template: give the prompt as text or as token ids")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        return list(ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of tokens, as they stand: no spaces are cleaned up, ids without a token have no text."""
        return str(self._decode(list(ids), skip_special_tokens=skip_special))

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        """The text of one token as it reads after others, its leading space included."""
        anchor = self._anchor
        return self.decode([*anchor, token], skip_special)[len(self.decode(anchor, skip_special)) :]

    def vocabulary(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    @cached_property
    def longest_token_bytes(self) -> int:
        """UTF-8 bytes of text that one token stands for at most."""
        # A vocabulary spells a token in as many bytes as its text, or in more: as soon as no spelling is longer than
        # the longest text so far, no text is.
        spellings = sorted(((len(token.encode()), number) for token, number in self.vocabulary().items()), reverse=True)
        longest = 1
        for spelling, number in spellings:
            if spelling <= longest:
                break
            longest = max(longest, len(self.decode_token(number, skip_special=False).encode()))
        return longest

    @cached_property
    def fingerprint(self) -> str:
        """See `tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self.vocabulary())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The token that ends a text, where the tokenizer names one."""
        found = self._tokenizer.eos_token_id
        return () if found is None else (int(found),)

    def _decode_slowly(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def tokenizer_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256, in hex, over the map from token to id, added tokens included.

    Two tokenizers with the same fingerprint give every id the same token; how they split text may differ.
    """
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items()):
        for part in (token.encode("utf-8", "surrogatepass"), str(index).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class IncrementalDetokenizer:
    """Text as tokens come in: what `push` and `flush` return, put together, is what decoding all at once adds.

    A token's text depends on those before it: a first token loses its leading space, a character may lie in several
    tokens. So the tokens of the last complete characters are decoded along, and what the new ones add is returned. A
    text that ends inside a character is kept back until the character is complete, or is known never to be.

    The tokenizers themselves break the rule in one case. Those with byte fallback decode a run of byte tokens as a
    whole: one invalid byte turns all of the run into U+FFFD, and with it what was returned before that byte came.

    `tokenizers.decoders.DecodeStream` cannot stand in: it needs a Rust tokenizer, raises at that invalid byte, returns
    text of the prompt where the prompt ends inside a character, and waits behind U+FFFD for ever. Tests show each case.

    Args:
        tokenizer: decodes.
        prompt_ids: the tokens before; their text is not returned.
        skip_special: special tokens have no text.

    Attributes:
        pending: whether the tokens pushed so far end inside a character, kept back.
    """

    _LONGEST = 64  # tokens without a complete character after which none is expected any more
    _FAR = 1024  # tokens at the end of the prompt among which one is sought that begins with a character

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tokens: list[int] = []
        self._context = 0  # how many of the tokens come before those that are not complete
        self._returned = 0  # how many characters of their text are out
        self._prompt_end = ""  # the text of the tokens when the prompt ended inside a character
        self.pending = False
        for token in self._tail(prompt_ids):
            self.push(token)
        if self.pending:
            self._prompt_end, self.pending = self._decode(self._tokens), False

    def push(self, token: int) -> str:
        """The text that this token completes: characters only, never a part of one."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        complete = text.rstrip(_BROKEN)
        self.pending = complete != text
        is_stuck = self.pending and len(self._tokens) - self._context > self._LONGEST
        if is_stuck:
            complete = text[:-1]  # no encoding leaves this much open: only the last can still become a character
        new = self._return(complete)
        if is_stuck:
            self._restart(self._tokens[-4:])
        elif not self.pending:
            self._restart(self._tokens[self._context :])
        return new

    def flush(self) -> str:
        """What is still kept back, at the end: bytes that never became a character read U+FFFD."""
        if not self.pending:
            return ""
        self.pending = False
        return self._return(self._decode(self._tokens))

    def _return(self, text: str) -> str:
        begin = self._returned
        if text.startswith(self._prompt_end):  # the prompt's last character is broken for good
            begin = max(begin, len(self._prompt_end))
        self._returned = max(begin, len(text))
        return text[begin:]

    def _restart(self, tokens: list[int]) -> None:
        """Goes on from the tokens of the last characters. Those without text cannot stand before others."""
        text = self._decode(tokens)
        if text:
            self._tokens, self._prompt_end = tokens, ""
            self._context = 0 if self.pending else len(tokens)
            self._returned = len(text) - self.pending
        elif len(tokens) > self._LONGEST:
            del self._tokens[self._context :]

    def _tail(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The end of the prompt, from the last token on that begins with a character."""
        far = max(0, len(prompt_ids) - self._FAR)
        for start in range(len(prompt_ids) - 1, far, -1):
            text = self._decode(prompt_ids[start : start + 1])
            if text and not text.startswith(_BROKEN):
                return prompt_ids[start:]
        return prompt_ids[far:]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
