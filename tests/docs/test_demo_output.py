"""The tutorial shows what `outrider demo` prints."""

import re
import subprocess
import sys

import pytest

from tests.docs.pages import blocks
from tests.project.tree import ROOT

PAGE = ROOT / "docs" / "tutorial" / "first-text.md"
_ALONE = re.compile(r"^target alone +(\d+) +(\d+) ", re.MULTILINE)
_REJECTED, _OWN = re.compile(r"\[-.*?-\]"), re.compile(r"\{\+(.*?)↵?\+\}")


def _alone(text: str) -> tuple[str, str]:
    """Tokens and passes of the target alone."""
    (found,) = _ALONE.findall(text)
    return found


@pytest.mark.slow
def test_the_demo_prints_what_the_tutorial_shows() -> None:
    """Apart from what depends on times, as γ does."""
    command = [sys.executable, "-m", "outrider.cli", "demo", "--repeats", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    drawn, table = (block.text for block in blocks(PAGE, "text"))
    legend, text = drawn.split("\n\n", 1)
    assert legend in printed
    assert _OWN.sub(r"\1", _REJECTED.sub("", text)) in _OWN.sub(r"\1", _REJECTED.sub("", printed))
    assert _alone(table) == _alone(printed)
    assert table.strip().splitlines()[-1] in printed
