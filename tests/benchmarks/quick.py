"""A quick run of a benchmark of pairs, as its user starts it, and what holds for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def run(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run it on two prompts, with `out.json` in `folder`; return the document of its last line, and its runs.

    Resumed, it has nothing left to measure and comes to the same figures.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"text": "def mean(values):"}\n{"text": "import os"}\n')
    output = folder / "out.json"
    asked = [*arguments, "--prompts-file", str(prompts), "--output", str(output)]
    assert main(asked) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = json.loads(output.read_text())
    assert written["summary"] == document["summary"]
    assert str(folder) not in output.read_text()

    assert main([*asked, "--resume"]) == 0
    assert json.loads(output.read_text())["runs"] == written["runs"]
    return document, written["runs"]
