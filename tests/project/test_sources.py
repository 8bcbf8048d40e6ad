"""Each module has a docstring and stays small enough to be read at once."""

import re

from tests.project.tree import ROOT, is_generated, sources

MOST_LINES = 500
"""Of one file; a longer one has two reasons to change."""

_DOCSTRING = re.compile(r'(?:#.*\n|\s)*"""')
"""At the beginning of a file, after comments."""


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(".py")
        if not is_generated(path)
        and not (path.name == "__init__.py" and path.is_relative_to(ROOT / "tests") and path.stat().st_size == 0)
        and not _DOCSTRING.match(path.read_text(encoding="utf-8"))
    ]
    assert not silent, f"modules without a docstring: {', '.join(silent)}"


def test_no_file_outgrows_a_reader() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(".py")
        if not is_generated(path)
    }
    long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
    assert not long, f"files over {MOST_LINES} lines: {long}"
