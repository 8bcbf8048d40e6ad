"""Progress in a log: few plain lines, by a fake clock; and a bar on a terminal."""

import os
import pty
import subprocess
import sys

from outrider.cli.progress import INTERVAL_S, Lines


def test_a_line_at_each_stage_every_interval_and_at_the_end() -> None:
    lines, clock = list[str](), [100.0]
    update = Lines("tokens", lines.append, lambda: clock[0])
    update("Loading", 0, 0)
    for second in range(95):
        clock[0] = 105.0 + second
        update("Writing", second, 2000, "a text")
    update("Measuring", 1, 2)
    update("Measuring", 2, 2)
    update("Measuring", 2, 2)
    assert INTERVAL_S == 30
    assert lines == [
        "outrider: 0 s: Loading",
        "outrider: 5 s: Writing: 0 of 2,000 tokens (a text)",
        "outrider: 35 s: Writing: 30 of 2,000 tokens (a text)",
        "outrider: 65 s: Writing: 60 of 2,000 tokens (a text)",
        "outrider: 95 s: Writing: 90 of 2,000 tokens (a text)",
        "outrider: 99 s: Measuring: 1 of 2 tokens",
        "outrider: 99 s: Measuring: 2 of 2 tokens",
    ]


_TWO_STAGES = """
from outrider.cli.progress import progress

with progress("texts") as update:
    update("Warm-up", 0, 10)
    update("Repeat", 4, 10, "a cell")
"""


def test_a_terminal_has_a_bar() -> None:
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", _TWO_STAGES], stderr=theirs, env=os.environ | {"TERM": "xterm"}, check=True, timeout=60
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "a cell" in shown
    assert "4 of 10 texts" in shown
    assert "━" in shown
    assert "outrider:" not in shown
