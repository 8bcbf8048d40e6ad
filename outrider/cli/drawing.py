"""Draws a generation as it comes, each token by its origin, as [L Figure 1] does. It talks to no service.

In colour: accepted draft tokens green, the rejected one of a round red and struck, the target's own blue. Without
colour: accepted ones plain, `[-rejected-]`, `{+the target's own+}`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rich.console import Console
from rich.style import Style
from rich.text import Text

from outrider.client import Chunk, TokenOrigin

_ACCEPTED = Style(color="green")
_REJECTED = Style(color="red", strike=True)
_TARGET = Style(color="blue", bold=True)
_PROMPT = Style(dim=True)


class TokenWriter:
    """Writes the chunks of one sample to a console. Rounds must have been asked for."""

    def __init__(self, console: Console):
        self._console = console
        self._colour = console.color_system is not None and not console.no_color
        self._length = 0
        self._held: deque[tuple[str, TokenOrigin]] = deque()  # tokens whose text has not come
        # The first rejected token of a round, by the output position it would have had.
        self._rejected: dict[int, str] = {}

    def legend(self) -> None:
        """Says what the marks mean."""
        line = Text()
        for part in (
            self._accepted("accepted draft tokens"),
            Text("  "),
            self._struck("rejected draft token"),
            Text("  "),
            self._own("the target's own token"),
        ):
            line.append(part)
        self._console.print(line, soft_wrap=True)

    def prompt(self, text: str) -> None:
        """Writes the prompt; the tokens follow on the same line."""
        self._write(Text(text, _PROMPT if self._colour else ""))

    def chunk(self, chunk: Chunk) -> None:
        """Writes more of the sample."""
        for report in chunk.rounds:
            if report.accepted < len(report.drafted_texts):
                self._rejected[report.output_length + report.accepted] = report.drafted_texts[report.accepted]
        self._held.extend(zip(chunk.token_texts, chunk.origins, strict=True))
        whole = [self._held.popleft() for _ in range(len(self._held) - chunk.held_tokens)]
        line = Text()
        for text, (_, origin) in zip(shares(chunk.text, [each for each, _ in whole]), whole, strict=True):
            rejected = self._rejected.pop(self._length, None)
            if rejected is not None:
                line.append(self._struck(_visible(rejected)))
            line.append(self._accepted(text) if origin is TokenOrigin.DRAFT else self._own(_marked(text)))
            self._length += 1
        self._write(line)

    def end(self) -> None:
        """Ends the line."""
        self._console.print()

    def _write(self, line: Text) -> None:
        self._console.print(line, end="", soft_wrap=True)
        self._console.file.flush()

    def _accepted(self, text: str) -> Text:
        return Text(text, _ACCEPTED if self._colour else "")

    def _struck(self, text: str) -> Text:
        return Text(text, _REJECTED) if self._colour else Text(f"[-{text}-]" if text else "")

    def _own(self, text: str) -> Text:
        if self._colour:
            return Text(text if text.strip(" ") else "·" * len(text), _TARGET)  # a space has no colour
        # The mark closes before a line ends, so that lines stay lines.
        head, newline, tail = text.partition("\n")
        return Text(f"{{+{head}+}}{newline}{tail}" if text else "")


def shares(text: str, token_texts: Sequence[str]) -> list[str]:
    """Cuts a text into its tokens' parts; they join to the text.

    A token's text by itself is not always its part: a character may span tokens, and some tokenizers drop the space
    before a word. What cannot be told apart goes to the last of the tokens that share it.
    """
    parts, unsettled, position = [], False, 0
    for token_text in token_texts:
        found = text.find(token_text, position) if token_text and "\ufffd" not in token_text else -1
        if found < 0:
            parts.append("")
            unsettled = unsettled or token_text != ""
            continue
        if unsettled:
            parts[-1] += text[position:found]
            position, unsettled = found, False
        parts.append(text[position : found + len(token_text)])
        position = found + len(token_text)
    if parts:
        parts[-1] += text[position:]
    return parts


def _visible(text: str) -> str:
    """A token that is shown and not written: its white space as signs."""
    return text.replace("\n", "↵").replace("\t", "⇥")


def _marked(text: str) -> str:
    """A token that is written: the end of a line gets a sign, since it could not be seen otherwise."""
    return text.replace("\n", "↵\n", 1)
