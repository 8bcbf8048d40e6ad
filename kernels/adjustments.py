"""Changes to the logits of a row: penalties, biases, banned and not-yet-allowed ids, and the rules of `generate`.

Each row counts the tokens of its own prefix: the row after two drafted tokens counts those two.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.generation_rules import DecoderState, GenerationRules


@dataclass(frozen=True, slots=True)
class LogitRules:
    """A request's changes to the target's logits.

    Attributes:
        repetition_penalty: divides positive and multiplies negative logits of every id seen in prompt or output.
        presence_penalty: subtracted once from ids generated at least once.
        frequency_penalty: subtracted for each time an id was generated.
        logit_bias: (id, amount) pairs, added; -inf bans the id.
        banned_tokens: ids that may never be generated.
        stop_token_ids: ids banned until `min_new_tokens` tokens have been generated.
        min_new_tokens: see `stop_token_ids`.
        generation: the rules of `generate` for an encoder–decoder model; prompts are the decoder's.
        max_new_tokens: the longest output, where `generation` may force an EOS; 0 if not known.

    Raises:
        ValueError: a number is not finite, out of range, or an id is negative or given two biases.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    generation: GenerationRules | None = None
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be finite and above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite")
        for name in ("min_new_tokens", "max_new_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for token, amount in self.logit_bias:
            if math.isnan(amount) or amount == math.inf:
                raise ValueError(f"logit_bias of token {token} is {amount}; it must be finite, or -inf")
        biased = [token for token, _ in self.logit_bias]
        if len(set(biased)) < len(biased):
            twice = next(token for token in biased if biased.count(token) > 1)
            raise ValueError(f"logit_bias has the token {twice} {biased.count(twice)} times; give each token once")
        for name, ids in self._named_ids():
            if ids and min(ids) < 0:
                raise ValueError(f"{name} has the token {min(ids)}; ids must be at least 0")

    @property
    def is_identity(self) -> bool:
        """Whether no logit is ever changed."""
        is_plain = not (self.counts_tokens or self.logit_bias or self.banned_tokens or self._holds_back_stops)
        return is_plain and self.generation is None

    def check_ids(self, vocab_size: int) -> None:
        """Check that all ids are below `vocab_size`.

        Raises:
            ValueError: an id is not.
        """
        for name, ids in self._named_ids():
            if ids and max(ids) >= vocab_size:
                raise ValueError(f"{name} has the token {max(ids)}; ids must be below {vocab_size}")
        if self.generation is not None:
            self.generation.check_ids(vocab_size)

    def _named_ids(self) -> tuple[tuple[str, Sequence[int]], ...]:
        biased = [token for token, _ in self.logit_bias]
        return (
            ("logit_bias", biased),
            ("banned_tokens", self.banned_tokens),
            ("stop_token_ids", self.stop_token_ids),
        )

    @property
    def counts_tokens(self) -> bool:
        """Whether there is a penalty, for which tokens are counted."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def _holds_back_stops(self) -> bool:
        return self.min_new_tokens > 0 and len(self.stop_token_ids) > 0


@dataclass(frozen=True, slots=True, eq=False)
class RowAdjustment:
    """The change to one row: z' = (z / r if z > 0 else z · r) + bias, at the named ids only; then bans of many ids.

    Attributes:
        ids: ascending, int64 `[n]`.
        repetition: r, float32 `[n]`; 1 leaves the logit as it is.
        bias: float32 `[n]`; -inf bans the id.
        ranges: of banned ids, each from its first to before its end.
        timestamps_from: the first timestamp; all ids before it are banned where log Σ exp z' over timestamps is above
            every z' before them. -1 if there is no such rule.
    """

    ids: np.ndarray
    repetition: np.ndarray
    bias: np.ndarray
    ranges: tuple[tuple[int, int], ...] = ()
    timestamps_from: int = -1

    def within(self, size: int) -> "RowAdjustment":
        """The change to the first `size` logits."""
        end = int(np.searchsorted(self.ids, size))
        if end == len(self.ids):
            return self
        return replace(self, ids=self.ids[:end], repetition=self.repetition[:end], bias=self.bias[:end])

    @property
    def bans_many(self) -> bool:
        """Whether it has more than the sparse change."""
        return len(self.ranges) > 0 or self.timestamps_from >= 0


@dataclass(frozen=True, slots=True, eq=False)
class CountedChanges:
    """The change to one row, and what makes it that of the next row when a token is generated.

    Attributes:
        row: the change now.
        bias: of each id without penalties, float64 `[n]`; empty if tokens are not counted.
        counts: how often each id was generated, int32 `[n]`; empty if tokens are not counted.
        rules: with the penalties.
    """

    row: RowAdjustment
    bias: np.ndarray
    counts: np.ndarray
    rules: LogitRules


class Adjuster:
    """Tracks one sequence and returns the changes to the row of its next token.

    Tokens outside the vocabulary count towards `min_new_tokens`, but have no logit to change.
    """

    def __init__(
        self, rules: LogitRules, prompt_tokens: Sequence[int], vocab_size: int, committed: Sequence[int] = ()
    ) -> None:
        """Start after the prompt and the committed tokens.

        Raises:
            ValueError: the rules name an id that is not below `vocab_size`.
        """
        rules.check_ids(vocab_size)
        self._decoder: DecoderState | None = None
        if (generation := rules.generation) is not None:
            self._decoder = DecoderState(generation, prompt_tokens, vocab_size, rules.max_new_tokens)
            penalty = generation.repetition_penalty if rules.repetition_penalty == 1 else rules.repetition_penalty
            banned = rules.banned_tokens + generation.always_banned(vocab_size)
            rules = replace(rules, repetition_penalty=penalty, banned_tokens=banned)
            for token in committed:
                self._decoder.push(token)
        self._rules = rules
        self._vocab_size = vocab_size
        self._generated = list(committed)
        self._counts = Counter(committed if rules.counts_tokens else ())
        self._static_bias = dict(rules.logit_bias) | dict.fromkeys(rules.banned_tokens, -math.inf)
        self._prompt = frozenset(prompt_tokens) if rules.repetition_penalty != 1 else frozenset()
        self._stops = np.array(sorted(set(rules.stop_token_ids)) if rules._holds_back_stops else [], dtype=np.int64)

        ids = self._prompt.union(self._static_bias, self._stops.tolist(), self._counts)
        self._ids = np.array(sorted(token for token in ids if 0 <= token < vocab_size), dtype=np.int64)
        self._repetition = np.array([self._repetition_of(int(token)) for token in self._ids], dtype=np.float32)
        self._bias = np.array([self._bias_of(int(token)) for token in self._ids], dtype=np.float32)

    @classmethod
    def after(
        cls, prompt_tokens: Sequence[int], committed: Sequence[int], rules: LogitRules, vocab_size: int
    ) -> "Adjuster | None":
        """An adjuster after prompt and committed tokens; None if the rules change nothing."""
        return None if rules.is_identity else cls(rules, prompt_tokens, vocab_size, committed)

    def copy(self) -> "Adjuster":
        copy = Adjuster.__new__(Adjuster)
        copy.__dict__.update(self.__dict__)
        copy._generated, copy._counts = list(self._generated), self._counts.copy()
        copy._ids, copy._repetition, copy._bias = self._ids, self._repetition.copy(), self._bias.copy()
        copy._decoder = self._decoder.copy() if self._decoder is not None else None
        return copy

    @property
    def n_generated(self) -> int:
        """Tokens pushed and not removed."""
        return len(self._generated)

    def push(self, token: int) -> None:
        """Record a generated or drafted token."""
        self._generated.append(token)
        self._recount(token, 1)
        if self._decoder is not None:
            self._decoder.push(token)

    def pop(self) -> None:
        """Remove the last pushed token.

        Raises:
            IndexError: nothing was pushed.
        """
        self._recount(self._generated.pop(), -1)
        if self._decoder is not None:
            self._decoder.pop()

    def truncate(self, n_generated: int) -> None:
        """Remove all but the first `n_generated` tokens.

        Raises:
            ValueError: fewer tokens were pushed, or the number is negative.
        """
        if not 0 <= n_generated <= len(self._generated):
            raise ValueError(f"n_generated is {n_generated}; it must be 0 to {len(self._generated)}, the tokens pushed")
        while len(self._generated) > n_generated:
            self.pop()

    def rows(self, tokens: Sequence[int]) -> list[RowAdjustment | None]:
        """Return the changes to the rows of drafted tokens and of the token after them. Keeps none of the tokens."""
        generated, rows = self.n_generated, [self.row()]
        for token in tokens:
            self.push(token)
            rows.append(self.row())
        self.truncate(generated)
        return rows

    def row(self) -> RowAdjustment | None:
        """Return the change to the row of the next token; None if nothing changes."""
        if self._decoder is None:
            return self._counted_row()
        forced = self._decoder.forced()
        if forced is not None:
            return replace(_UNCHANGED, ranges=((0, forced), (forced + 1, self._vocab_size)))
        bans = self._decoder.bans()
        row = self._counted_row()
        if bans.tokens:
            row = _with_bans(row or _UNCHANGED, np.array(sorted(bans.tokens), dtype=np.int64))
        if bans.ranges:
            row = replace(row or _UNCHANGED, ranges=bans.ranges, timestamps_from=bans.timestamps_from)
        return row

    def is_counted(self, tokens: int) -> bool:
        """Whether `counted` and counts of further tokens make the next `tokens` rows.

        They do not under the rules of `generate`, and if stop tokens are banned in some of the rows only.
        """
        last = self.n_generated + tokens - 1
        return self._decoder is None and self._bans_stops(self.n_generated) == self._bans_stops(last)

    def counted(self) -> CountedChanges:
        """Return the change to the next row, for a decode loop that makes those of later rows by its own counts."""
        row = self._counted_row() or _UNCHANGED
        ids = row.ids.tolist() if self._rules.counts_tokens else []
        bias = np.array([self._static_bias.get(token, 0.0) for token in ids])
        return CountedChanges(row, bias, np.array([self._counts.get(token, 0) for token in ids], np.int32), self._rules)

    def _counted_row(self) -> RowAdjustment | None:
        """Return the change without the bans of the decoder's state."""
        bans_stops = self._bans_stops(self.n_generated)
        if not (self._static_bias or self._rules.counts_tokens or bans_stops) or not len(self._ids):
            return None
        bias = self._bias.copy()
        if bans_stops:
            bias[np.searchsorted(self._ids, self._stops)] = -math.inf
        return RowAdjustment(self._ids, self._repetition.copy(), bias)

    def _bans_stops(self, n_generated: int) -> bool:
        return self._rules._holds_back_stops and n_generated < self._rules.min_new_tokens

    def _recount(self, token: int, change: int) -> None:
        if not self._rules.counts_tokens or not 0 <= token < self._vocab_size:
            return
        self._counts[token] += change
        slot = int(np.searchsorted(self._ids, token))
        if slot == len(self._ids) or self._ids[slot] != token:
            # New arrays: earlier results of `row` must keep their ids.
            self._ids = _inserted(self._ids, slot, token)
            self._repetition = _inserted(self._repetition, slot, 1)
            self._bias = _inserted(self._bias, slot, 0)
        self._repetition[slot] = self._repetition_of(token)
        self._bias[slot] = self._bias_of(token)

    def _repetition_of(self, token: int) -> float:
        return self._rules.repetition_penalty if token in self._prompt or self._counts[token] else 1.0

    def _bias_of(self, token: int) -> float:
        count = self._counts[token]
        penalty = self._rules.presence_penalty * (count > 0) + self._rules.frequency_penalty * count
        return self._static_bias.get(token, 0.0) - penalty


_UNCHANGED = RowAdjustment(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))


def _inserted(array: np.ndarray, slot: int, value: float) -> np.ndarray:
    """`np.insert` of one value, in a tenth of its time."""
    longer = np.empty(len(array) + 1, array.dtype)
    longer[:slot], longer[slot], longer[slot + 1 :] = array[:slot], value, array[slot:]
    return longer


def _with_bans(row: RowAdjustment, banned: np.ndarray) -> RowAdjustment:
    """Return the row with ids `banned`, ascending and distinct, banned too."""
    ids = np.union1d(row.ids, banned)
    slots = np.searchsorted(ids, row.ids)
    repetition, bias = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
    repetition[slots], bias[slots] = row.repetition, row.bias
    bias[np.searchsorted(ids, banned)] = -math.inf
    return RowAdjustment(ids, repetition, bias)


def apply(logits: Tensor, rows: Sequence[RowAdjustment | None]) -> Tensor:
    """Return `logits` `[R, V]` with the adjustment of each row applied, in float32.

    `rows` has one entry per row, or is empty. If nothing changes, the same tensor is returned, else a copy. A row with
    all ids banned becomes -inf throughout, which `sampling.bad_rows` reports.

    Raises:
        ValueError: `rows` is neither empty nor of length R.
    """
    if rows and len(rows) != logits.shape[0]:
        raise ValueError(f"rows has length {len(rows)}; it must be 0 or that of the logits, {logits.shape[0]}")
    changed = [(number, row) for number, row in enumerate(rows) if row is not None and (len(row.ids) or row.bans_many)]
    if not changed:
        return logits
    device = logits.device
    lengths = [len(row.ids) for _, row in changed]
    at = torch.from_numpy(np.repeat([number for number, _ in changed], lengths)).to(device)
    ids = torch.from_numpy(np.concatenate([row.ids for _, row in changed])).to(device)
    repetition = torch.from_numpy(np.concatenate([row.repetition for _, row in changed])).to(device)
    bias = torch.from_numpy(np.concatenate([row.bias for _, row in changed])).to(device)

    out = logits.to(torch.float32, copy=True)
    z = out[at, ids]
    out[at, ids] = torch.where(z > 0, z / repetition, z * repetition) + bias
    for number, row in changed:
        z = out[number]
        for first, end in row.ranges:
            z[first:end] = -math.inf
        if row.timestamps_from >= 0:
            text, timestamps = z[: row.timestamps_from], z[row.timestamps_from :]
            text.masked_fill_(timestamps.logsumexp(0) > text.max(), -math.inf)
    return out


def apply_many_bans(logits: Tensor, rows: Sequence[RowAdjustment | None]) -> Tensor:
    """Return `logits` `[R, V]` where rows that ban more than single ids have -inf at all banned ones; the rest is left.

    For kernels that make sparse changes themselves: those leave -inf as it is. If no row has such bans, the same tensor
    is returned, else a copy of the same type and row stride, for which the kernels are compiled already.
    """
    changed = [number for number, row in enumerate(rows) if row is not None and row.bans_many]
    if not changed:
        return logits
    R, V = logits.shape
    out = logits.new_empty(R, max(V, logits.stride(0)))[:, :V]
    out.copy_(logits)
    adjusted = apply(logits[changed], [rows[number] for number in changed])
    out[changed] = out[changed].masked_fill(adjusted == -math.inf, -math.inf)
    return out
