"""Text out: tokens become text, stop strings are found, and what may become one is held back."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """What turns tokens into text (`outrider.runtime.tokenizer.IncrementalDetokenizer`)."""

    def push(self, token: int, /) -> str:
        """The text that this token completes; what ends inside a character stays inside."""

    def flush(self) -> str:
        """The text of what is left, at the end."""

    @property
    def pending(self) -> bool:
        """Whether something is left inside."""


class StopFinder:
    """Follows a text character by character and says where a stop string is complete.

    Of strings that are complete at the same character the longest counts. One character costs O(1) for each string
    (Knuth, Morris and Pratt), so what is found does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of the longest prefix of each that the text ends in

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, character: str) -> str | None:
        """The stop string that this character completes."""
        found = None
        for i, stop in enumerate(self._stops):
            borders, matched = self._borders[i], self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                found = found or stop
                matched = borders[matched]
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix length n, the length of the longest proper prefix of `stop[:n]` that it also ends in."""
    borders, border = [0, 0], 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border]
        border += stop[border] == character
        borders.append(border)
    return borders


@dataclass(frozen=True, slots=True)
class Released:
    """What may be sent: a text, and how many more tokens it brings to their end.

    Attributes:
        tail: what follows it at the end alone: the beginning of a token that a stop string cuts.
        ends: where in `text` each of the tokens ends.
    """

    text: str
    tokens: int
    tail: str = ""
    ends: tuple[int, ...] = ()

    def by_token(self) -> Iterator["Released"]:
        """The same, a token at a time, the tail aside. Where several end at one place the last of them has the text."""
        begin = 0
        for i, end in enumerate(self.ends):
            stop = begin if self.ends[i + 1 : i + 2] == (end,) else end
            yield Released(self.text[begin:stop], 1)
            begin = stop


class OutputText:
    """The text of one sample.

    Text leaves in whole tokens, so that what was sent is exactly the text of the tokens that were sent, and a resumed
    request goes on where it ends. Only at the end, where a stop string cuts a token, its first part leaves without it.

    Attributes:
        stopped_by: the stop string that ended the text, once there is one. The one that is complete first counts, and
            of those complete at the same character the longest.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0, written: int = 0
    ) -> None:
        """Begins after `written` tokens of output; no stop string counts before there are `min_tokens` of them."""
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._finder = StopFinder(stop)
        self._finds = bool(stop)
        self._min_tokens = min_tokens
        self._written = written
        self._text = ""  # not sent yet; begins at the position `_sent`
        self._sent = 0
        self._length = 0  # of all text so far
        self._cut: int | None = None  # where the text ends
        self._ends: deque[int] = deque()  # of the tokens not released yet: where the text of each ends
        self._incomplete = 0  # tokens after those, whose text ends inside a character

    def push(self, token: int) -> bool:
        """Takes in one token; True when a stop string ends the text, after which no more may come."""
        self._written += 1
        self._scan(self._detokenizer.push(token))
        self._incomplete += 1
        if not self._detokenizer.pending:
            self._settle()
        return self._cut is not None

    def push_silent(self) -> None:
        """Takes in a token that has no text, such as a stop token at the end."""
        self._written += 1
        self._incomplete += 1

    def release(self) -> Released:
        """What may be sent now and was not before. After the cut: all up to it."""
        if self._cut is not None:
            return self._take(self._cut)
        safe = self._length - self._finder.held
        upto = self._sent
        for end in self._ends:
            if end > safe:
                break
            upto = end
        return self._take(upto)

    def finish(self) -> Released:
        """The rest, when the sample has ended: what was held back, up to the cut if there is one."""
        if self._cut is None:
            self._scan(self._detokenizer.flush())
        self._settle()
        end = self._length if self._cut is None else self._cut
        return self._take(end)

    def _settle(self) -> None:
        self._ends.extend([self._length] * self._incomplete)
        self._incomplete = 0

    def _scan(self, text: str) -> None:
        self._text += text
        if not self._finds:
            self._length += len(text)
            return
        for character in text:
            self._length += 1
            found = self._finder.feed(character)
            if found is not None and self._written >= self._min_tokens and self._cut is None:
                self.stopped_by = found
                self._cut = self._length - len(found)

    def _take(self, upto: int) -> Released:
        ends, whole = [], self._sent
        while self._ends and self._ends[0] <= upto:
            whole = self._ends.popleft()
            ends.append(whole - self._sent)
        text, tail = self._text[: whole - self._sent], self._text[whole - self._sent : upto - self._sent]
        self._text = self._text[upto - self._sent :]
        self._sent = upto
        return Released(text, len(ends), tail, tuple(ends))
