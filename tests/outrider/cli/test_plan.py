"""`outrider plan` of given values and of a running pair: table, JSON, picture and refusals."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from outrider.cli import demo, main, plan
from outrider.client import Client
from outrider.theory import best_gamma, improvement
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import model_pb2
from tests.cluster import MODELS

GIVEN = ["--alpha", "0.8", "--c", "0.1"]


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="outrider")


def _document(*arguments: str) -> Any:
    done = _plan(*arguments, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_plan_of_given_values_is_printed() -> None:
    done = _plan(*GIVEN, "--round-trip", "0.2", "--target-step", "25", "--token-cost", "0.01")
    gamma = best_gamma(0.8, 0.1, 0.2, lambda tokens: 1 + 0.01 * (tokens - 1))
    speed_up = improvement(0.8, gamma, 0.1, 0.2, 1 + 0.01 * gamma)
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"{gamma}: {speed_up:.2f} times as fast as the target alone" in done.stdout
    for words in ("drafts of one stream each", "drafting pays", "above α = ", "below R = ", "streams in each pass"):
        assert words in done.stdout


def test_a_plan_says_where_drafting_does_not_pay() -> None:
    done = _plan("--alpha", "0.3", "--c", "0.5")
    assert done.exit_code == 0
    assert "0: drafting does not pay; γ = 1 is 0.87 times as fast" in done.stdout
    assert "at no round trip" in done.stdout


def test_milliseconds_and_target_steps_are_the_same_plan() -> None:
    steps = _document(*GIVEN, "--round-trip", "0.2", "--target-step", "25")
    assert steps == _document("--alpha", "0.8", "--c", "2.5ms", "--round-trip", "5ms", "--target-step", "25")
    assert steps["tokens_per_second"]["target_alone"] == 40
    assert steps["pair"]["c"] == 0.1
    assert steps["gamma"] == steps["fastest"]["gamma"] == best_gamma(0.8, 0.1, 0.2)


def test_several_alphas_are_by_position() -> None:
    """Their mean has the weights with which the positions are judged: 1, 0.9 and 0.72."""
    pair = _document("--alpha", "0.9,0.8,0.5", "--c", "0.1", "--parallel")["pair"]
    assert pair["by_position"] == pytest.approx([0.9, 0.8, 0.5, *[0.36 ** (1 / 3)] * 13])
    assert pair["alpha"] == pytest.approx((0.9 + 0.9 * 0.8 + 0.72 * 0.5) / (1 + 0.9 + 0.72))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    given = GIVEN if suffix == "png" else ["--alpha", "0.9,0.8,0.5", "--c", "0.1", "--parallel"]
    assert _plan(*given, "--picture", str(path)).exit_code == 0
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert "The star has α by position" in "".join(ElementTree.parse(path).getroot().itertext())


def test_without_matplotlib_only_the_picture_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = _plan(*GIVEN, "--picture", str(tmp_path / "plan.png"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "outrider: matplotlib is not installed, and --picture needs it: pip install -e '.[bench]'\n"
    assert _plan(*GIVEN).exit_code == 0


def test_a_running_pair_is_measured(draft_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given value replaces the measured one; with a slower target, draft and network keep their milliseconds."""
    monkeypatch.setattr(demo, "busy_processors", lambda: 0.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((MODELS / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    arguments = ["--draft", draft_address, "--max-new-tokens", "32", "--temperature", "0"]
    arguments += ["--prompts-file", str(prompts)]
    found = _document(*arguments, "--target-step", "100000", "--token-cost", "0", "--c-hat", "0.01")
    pair, measured = found["pair"], found["measured"]
    assert measured["speed_ups"].keys() == {"2", "16"}
    assert pair["alpha"] == measured["pair"]["alpha"] > 0.5
    assert (pair["step_ms"], pair["c_hat"]) == (100_000, 0.01)
    assert pair["c"] * 100_000 == pytest.approx(measured["pair"]["c"] * measured["pair"]["step_ms"])
    assert pair["round_trip"] * 100_000 == pytest.approx(measured["pair"]["round_trip"] * measured["pair"]["step_ms"])
    assert found["gamma"] > 1  # beside 100 s of the target a draft step is nothing, on a stalled machine too
    table = _plan(*arguments, "--top-k", "40").stdout
    assert "measured speed-up" in table
    assert "judged tokens after 3 of 3 prompts" in table
    assert re.search(r"^ *2 .* \d\.\d\d \(\d\.\d\d to \d\.\d\d\)$", table, re.MULTILINE)
    assert next(line for line in table.splitlines() if line.startswith("limits")).endswith("in hindsight"), "no wrap"


def test_speech_is_refused(draft_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "busy_processors", lambda: 0.0)

    def get_model(self: Client) -> Any:
        encoder = model_pb2.EncoderInfo(kind=model_pb2.ENCODER_KIND_SPEECH)
        return pb.DraftServiceGetModelResponse(target=model_pb2.ModelInfo(name="ear", encoder=encoder))

    monkeypatch.setattr(Client, "get_model", get_model)
    for command in (["plan"], ["trace", "x", "--output", "/dev/null"]):
        done = CliRunner().invoke(main, [*command, "--draft", draft_address])
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"the target ear takes speech, and {command[0]} takes text: outrider bench --audio" in done.stderr


def test_a_pair_that_drafts_nothing_cannot_be_measured(draft_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "busy_processors", lambda: 0.0)
    done = _plan("--draft", draft_address, "--drafter", "none", "--max-new-tokens", "16")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("outrider: the draft service drafted nothing")
    done = _plan("--draft", draft_address, "--max-gamma", "64")
    assert done.stderr == "outrider: --max-gamma is 64; the draft service allows at most 16\n"


def test_a_wrong_address_is_an_error_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "RETRY_TIMEOUT_S", 0.2)
    began = time.monotonic()
    done = _plan("--draft", "127.0.0.1:1", "--timeout", "20")
    assert done.exit_code == 1
    assert "UNAVAILABLE: nothing listens at 127.0.0.1:1" in done.stderr
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give --alpha and --c, or --draft HOST:PORT to measure them"),
        (["--alpha", "0.8"], 2, "give --alpha and --c"),
        (["--alpha", "1.2", "--c", "0"], 2, "'--alpha': 1.2 is not in the range 0<=x<=1"),
        (["--alpha", "0.8,x", "--c", "0"], 2, "'--alpha': 'x' is not a valid float range"),
        (["--alpha", "0.8", "--c", "-1"], 2, "'--c': '-1' is not a time from 0 to 1,000,000"),
        (["--alpha", "0.8", "--c", "2ms"], 2, "--c is 2 ms; give --target-step MS too"),
        ([*GIVEN, "--round-trip", "nan"], 2, "'--round-trip': 'nan' is not a time"),
        ([*GIVEN, "--token-cost", "inf"], 2, "'--token-cost': inf is not in the range"),
        ([*GIVEN, "--hit-rate", "2"], 2, "'--hit-rate': 2.0 is not in the range 0<=x<=1"),
        ([*GIVEN, "--max-gamma", "65"], 2, "'--max-gamma': 65 is not in the range 1<=x<=64"),
        ([*GIVEN, "--temperature", "0"], 2, "--temperature needs --draft"),
        ([*GIVEN, "--tls"], 2, "--tls needs --draft"),
        ([*GIVEN, "--picture", "plan.pdf"], 2, "--picture is plan.pdf: its name must end in .png or .svg"),
        ([*GIVEN, "--picture", "/nowhere/plan.png"], 2, "--picture is /nowhere/plan.png: there is no folder /nowhere"),
        ([*GIVEN, "--token-cost", "1e308"], 2, "'--token-cost': 1e+308 is not in the range 0<=x<=1000000.0"),
        (
            ["--alpha", "0.8", "--c", "1e308", "--round-trip", "1e308"],
            2,
            "'--c': '1e308' is not a time from 0 to 1,000",
        ),
        (["--draft", "nowhere"], 2, "'--draft': 'nowhere' is not HOST:PORT"),
        (["--draft", "127.0.0.1:1", "--prompts-file", "/dev/null"], 1, "--prompts-file /dev/null has no prompts"),
        (["--draft", "127.0.0.1:1", "--timeout", "0.5"], 1, "UNAVAILABLE: nothing listens at 127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], code: int, message: str) -> None:
    done = _plan(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    *_, last = done.stderr.splitlines()
    assert message in last
