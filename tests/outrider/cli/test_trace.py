"""`outrider trace` against a real pair: its files, its table and its refusals."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.client import Client

PROMPT = "def mean(values):\n"


def _trace(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments], prog_name="outrider", **options)


def test_a_trace_and_a_picture_are_written(draft_address: str, tmp_path: Path) -> None:
    output, picture = tmp_path / "mine.json", tmp_path / "mine.svg"
    files = ["--output", str(output), "--picture", str(picture)]
    done = _trace("--draft", draft_address, *files, "--gamma", "3", "--max-new-tokens", "12", PROMPT)
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["tokens", "12", "12"] in lines
    parts = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "(ms)" in line)
    (whole,) = (text for name, text in parts.items() if name == "whole request (ms)")
    sums = [sum(map(float, column)) for column in zip(*(text.split() for text in parts.values()), strict=True)]
    assert sums == pytest.approx([2 * float(value) for value in whole.split()], abs=0.5)
    assert lines[0] == ["with", "speculation", "target", "alone"]
    assert "Both texts are the same." in done.stdout
    assert f"Trace: {output}" in done.stdout
    assert f"Picture: {picture}" in done.stdout
    trace = json.loads(output.read_text(encoding="utf-8"))
    drafts = [event["args"]["tokens"] for event in trace["traceEvents"] if event.get("cat") == "draft"]
    assert drafts
    assert all(1 <= len(tokens) <= 3 for tokens in drafts)
    assert trace["otherData"]["command"].startswith("outrider")
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def test_json_has_both_texts(draft_address: str, tmp_path: Path) -> None:
    """The prompt comes from standard input."""
    arguments = ["--draft", draft_address, "--output", str(tmp_path / "trace.json"), "--json", "-"]
    options = ["--max-new-tokens", "12", "--temperature", "0", "--rule", "block", "--seed", "5"]
    done = _trace(*options, *arguments, input=PROMPT)
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    drafted, alone = document["runs"]
    with Client(draft_address, timeout=60) as client:
        expected = client.complete(PROMPT, temperature=0, max_new_tokens=12)
    assert document["prompt"] == PROMPT
    assert drafted["text"] == alone["text"] == expected.text
    assert (drafted["rule"], drafted["seed"]) == (alone["rule"], alone["seed"]) == ("block", 5)
    assert alone["phases_us"]["draft"] == 0 < alone["phases_us"]["target pass"]
    assert alone["phases_us"]["target pass"] == alone["timings"]["forward_us"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "none", "--gamma", "4", "--max-new-tokens", "4"], "the target alone: the drafter is none; name"),
        (["--max-new-tokens", "1"], "the target alone: a text of one token needs no draft."),
        (["--temperature", "1", "--max-new-tokens", "24"], "Both texts are the same."),
        (
            ["--temperature", "1", "--max-new-tokens", "24", "--rule", "block", "--gamma", "4"],
            "The texts differ: under the rule block",
        ),
    ],
)
def test_what_the_texts_are_is_said(draft_address: str, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = _trace("--draft", draft_address, "--output", str(tmp_path / "trace.json"), *arguments, PROMPT)
    assert done.exit_code == 0
    assert said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gamma", "0"], 2, "--gamma is 0: the target alone, which trace measures in any case; give at least 1"),
        (["--picture", "trace.pdf"], 2, "--picture is trace.pdf: its name must end in .png or .svg"),
        (["--picture", "/nowhere/a.svg"], 2, "--picture is /nowhere/a.svg: there is no folder /nowhere; make it first"),
        (["--output", "/nowhere/a.json"], 2, "--output is /nowhere/a.json: there is no folder /nowhere"),
        (["--max-new-tokens", "0"], 2, "'--max-new-tokens': 0 is not in the range x>=1"),
        (["--draft", "nowhere"], 2, "'--draft': 'nowhere' is not HOST:PORT"),
        (["--draft", "127.0.0.1:1", "--timeout", "0.5"], 1, "UNAVAILABLE: nothing listens at 127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], code: int, message: str) -> None:
    done = _trace(*arguments, PROMPT)
    assert (done.exit_code, done.stdout) == (code, "")
    *_, last = done.stderr.splitlines()
    assert message in last
    assert not Path("trace.json").exists()


def test_files_that_cannot_be_written_are_named(draft_address: str, tmp_path: Path) -> None:
    short = ["--draft", draft_address, "--max-new-tokens", "2", PROMPT]
    done = _trace("--output", "/dev/full", *short)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "outrider: --output is /dev/full: No space left on device"


def test_without_matplotlib_only_the_picture_fails(
    draft_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    short = ["--draft", draft_address, "--max-new-tokens", "2", "--output", str(tmp_path / "a.json"), PROMPT]
    done = _trace("--picture", str(tmp_path / "a.svg"), *short)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "outrider: matplotlib is not installed, and --picture needs it: pip install -e '.[bench]'\n"
    assert _trace(*short).exit_code == 0
