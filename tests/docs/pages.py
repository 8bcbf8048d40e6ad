"""The pages and their fenced blocks.

A block of `sh` or `python` runs in `test_snippets`, unless its fence says why not: "```sh no-test: needs a cluster".
Only hardware, the network, and programs with an environment of their own are reasons.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.project.tree import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

NEEDS = (
    "needs a GPU",
    "needs two GPUs",
    "needs two machines",
    "needs grpcurl",
    "needs a cluster",
    "needs docker",
    "needs the extra llama",
    "downloads two models",
)
"""Reasons why no test runs a block."""
BY_CLIENTS = "tests/clients runs it"
"""The reason of blocks whose program has an environment of its own: see `tests.clients.conftest`."""

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+|~~~+)(?P<language>\w*)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r" no-test: (?P<reason>\S.*)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its fence, from 1.
        info: the words of its fence after the language.
    """

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why `test_snippets` does not run it; None of one that runs."""
        found = _MARK.fullmatch(self.info.rstrip())
        return found and found["reason"]

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    """Return the path of a page, from the repository's root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order: those of the languages, or all."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        if not languages or found["language"] in languages:
            line = text.count("\n", 0, found.start()) + 1
            yield Block(page, line, found["language"], found["info"], textwrap.dedent(found["text"]))
