"""The rules by which transformers' `generate` changes logits of encoder–decoder models, as bans that tokens decide.

`GenerationRules` holds them; `DecoderState` follows the decoder's tokens and names those that may not come next.
Penalties and tokens that are always banned are static: `kernels.adjustments` has them already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """Whisper's rules for timestamps. The token before the first timestamp is Whisper's no-timestamps token.

    Attributes:
        first: the first timestamp; all higher ids are timestamps.
        eos_token: after the first timestamp of a pair only ids from this one on may follow.
        max_initial_index: the first token is one of timestamps 0 to this one; None allows all.
    """

    first: int
    eos_token: int
    max_initial_index: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """The changes of `generate` to the logits of one model; the defaults change nothing.

    Ids outside the vocabulary have no logit and no effect, except in `forced_bos` and `forced_eos`.

    Attributes:
        repetition_penalty: as in `adjustments.LogitRules`; holds unless the request has one.
        suppressed: tokens that may never be generated.
        begin_suppressed: tokens that may not be generated first; after a forced BOS, not next.
        bad_words: sequences whose last token may not follow the others.
        no_repeat_ngram_size: no n-gram of this size appears twice in prompt and output; 0 is off.
        min_length: tokens of prompt and output before one of `eos_tokens`.
        min_new_tokens: tokens of the output before one of `eos_tokens`; unless None, in place of `min_length`.
        eos_tokens: see `min_length`.
        forced_bos: the token that follows a prompt of one token. A forced token ignores all other rules.
        forced_eos: the last token if the output has `LogitRules.max_new_tokens` tokens.
        timestamps: hold for sequences without the no-timestamps token in the prompt.
    """

    repetition_penalty: float = 1.0
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int | None = None
    eos_tokens: tuple[int, ...] = ()
    forced_bos: int | None = None
    forced_eos: int | None = None
    timestamps: TimestampRules | None = None

    def always_banned(self, vocab_size: int) -> tuple[int, ...]:
        """Return the ids that no prefix allows: suppressed tokens, and bad words of one token that is no EOS."""
        words = {word[0] for word in self.bad_words if len(word) == 1} - set(self.eos_tokens)
        return tuple(sorted(token for token in words.union(self.suppressed) if 0 <= token < vocab_size))

    def check_ids(self, vocab_size: int) -> None:
        """Check that forced tokens, and the first timestamp, are in the vocabulary.

        Raises:
            ValueError: one is not.
        """
        first = self.timestamps.first if self.timestamps is not None else None
        for name, token in (("forced_bos", self.forced_bos), ("forced_eos", self.forced_eos), ("timestamps", first)):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(f"{name} has the token {token}; ids must be below {vocab_size}")


class Bans(NamedTuple):
    """The tokens that may not come next.

    Attributes:
        tokens: ids.
        ranges: of ids, each from its first to before its end.
        timestamps_from: the first timestamp, if text is banned once timestamps together are likelier than the best text
            token; -1 if there is no such rule.
    """

    tokens: frozenset[int] = frozenset()
    ranges: tuple[tuple[int, int], ...] = ()
    timestamps_from: int = -1


class DecoderState:
    """Prompt and output of one decoder, with the facts about them that the rules need.

    Args:
        prompt: the decoder's tokens before the first generated one.
        vocab_size: logits of a row.
        max_new_tokens: the longest output; 0 if it is not known, and then no EOS is forced.
    """

    def __init__(self, rules: GenerationRules, prompt: Sequence[int], vocab_size: int, max_new_tokens: int) -> None:
        self._rules, self._vocab_size, self._prompt_length = rules, vocab_size, len(prompt)
        self._last_length = len(prompt) + max_new_tokens - 1 if max_new_tokens else -1
        has_forced_bos = rules.forced_bos is not None and len(prompt) == 1
        self._begin_length = len(prompt) + has_forced_bos
        self._min_length = rules.min_length if rules.min_new_tokens is None else len(prompt) + rules.min_new_tokens
        self._timestamps = rules.timestamps
        if self._timestamps is not None and self._timestamps.first - 1 in prompt:
            self._timestamps = None
        self._words: dict[int, list[tuple[list[int], int]]] = {}  # by their last token but one
        for word in rules.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}  # the tokens after each n - 1 tokens
        self._stamps: list[int] = []  # generated timestamps
        for token in prompt:
            self.push(token)

    def copy(self) -> "DecoderState":
        copy = DecoderState.__new__(DecoderState)
        copy.__dict__.update(self.__dict__)
        copy._tokens, copy._stamps = list(self._tokens), list(self._stamps)
        copy._followers = {prefix: list(tokens) for prefix, tokens in self._followers.items()}
        return copy

    def push(self, token: int) -> None:
        n = self._rules.no_repeat_ngram_size
        is_generated = len(self._tokens) >= self._prompt_length
        self._tokens.append(token)
        if 0 < n <= len(self._tokens):
            self._followers.setdefault(tuple(self._tokens[-n:-1]), []).append(token)
        if self._timestamps is not None and is_generated and token >= self._timestamps.first:
            self._stamps.append(token)

    def pop(self) -> None:
        """Remove the last pushed token, which is none of the prompt."""
        n = self._rules.no_repeat_ngram_size
        if 0 < n <= len(self._tokens):
            prefix = tuple(self._tokens[-n:-1])
            self._followers[prefix].pop()
            if not self._followers[prefix]:
                del self._followers[prefix]
        token = self._tokens.pop()
        if self._timestamps is not None and token >= self._timestamps.first:
            self._stamps.pop()

    def forced(self) -> int | None:
        """Return the only token that may come next; None if it is open."""
        if len(self._tokens) == self._last_length and self._rules.forced_eos is not None:
            return self._rules.forced_eos
        return self._rules.forced_bos if len(self._tokens) == 1 else None

    def bans(self) -> Bans:
        """Return the tokens that may not come next, if none is forced. `GenerationRules.always_banned` is left out."""
        tokens, length = self._tokens, len(self._tokens)
        banned: set[int] = set()
        if self._rules.no_repeat_ngram_size:
            prefix = tuple(tokens[length + 1 - self._rules.no_repeat_ngram_size :])
            banned.update(self._followers.get(prefix, ()))
        if self._words and tokens:
            words = self._words.get(tokens[-1], ())
            banned.update(token for prefix, token in words if tokens[-len(prefix) :] == prefix)
        if length < self._min_length:
            banned.update(self._rules.eos_tokens)
        if length == self._begin_length:
            banned.update(self._rules.begin_suppressed)
        known = frozenset(token for token in banned if 0 <= token < self._vocab_size)
        if self._timestamps is None:
            return Bans(known)
        return Bans(known, self._timestamp_ranges(self._timestamps), self._timestamps.first)

    def _timestamp_ranges(self, rules: TimestampRules) -> tuple[tuple[int, int], ...]:
        """Return the id ranges that Whisper's rules ban: timestamps come first, in pairs, and never decrease."""
        first, V, written = rules.first, self._vocab_size, len(self._tokens) - self._prompt_length
        if written == 0:
            highest = V - 1 if rules.max_initial_index is None else first + rules.max_initial_index
            return (0, first), (highest + 1, V)
        is_stamp = self._tokens[-1] >= first
        follows_stamp = written < 2 or self._tokens[-2] >= first
        begins_pair = is_stamp and not follows_stamp
        lowest = first
        if self._stamps:
            lowest = self._stamps[-1] if begins_pair else self._stamps[-1] + 1
        earlier = (first - 1, lowest)  # with the no-timestamps token
        if begins_pair:
            return earlier, (0, rules.eos_token)
        return (earlier, (first, V)) if is_stamp else (earlier,)
