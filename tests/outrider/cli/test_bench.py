"""`outrider bench` against a real pair: its figures, its page in a browser, and its refusals."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from selenium import webdriver

from outrider.cli import bench, main
from outrider.evaluation.deployment import ALONE, POLICY, ROUND
from tests.browser import errors, needs_browser, open_browser
from tests.commands import Command
from tests.proxy import Proxy

TOKENS = 16  # of a text; no round holds so many
ARMS = [ALONE, "γ = 2", POLICY, "lookup, γ = 2"]
TINY = ["--gammas", "2", "--drafters", "model,lookup", "--streams", "1,2", "--texts", "1"]
TINY += ["--max-new-tokens", str(TOKENS)]


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], prog_name="outrider")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "report"


@pytest.fixture(scope="module")
def done(draft_address: str, folder: Path) -> Result:
    prompts = folder.with_suffix(".jsonl")
    prompts.write_text('{"text": "def mean(values):"}\n\n{"text": "import os\u2028", "id": 3}\n', encoding="utf-8")
    given = ["--prompts-file", str(prompts), "--output", str(folder), "--repeats", "2"]
    return _bench("--draft", draft_address, *TINY, *given)


@pytest.fixture(scope="module")
def document(done: Result, folder: Path) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads((folder / "report.json").read_text())


def test_every_cell_is_measured(document: Any) -> None:
    cells = document["cells"]
    expected = [(temperature, streams, arm) for temperature in (0, 1) for streams in (1, 2) for arm in ARMS]
    assert [(cell["temperature"], cell["streams"], cell["arm"]) for cell in cells] == expected
    for cell in cells:
        assert (cell["repeats"], cell["texts"], cell["refused"]) == (2, 2 * cell["streams"], 0)
        for name in ("tokens_per_second", "ratio", "ttft_ms", "tpot_ms"):
            assert 0 < cell[name]["low"] <= cell[name]["median"] <= cell[name]["high"]
        assert list(cell["round_us"]) == list(ROUND)
        assert cell["round_us"]["forward"] > 0
        assert cell["predicted_tpot_ms"] is None or (cell["predicted_tpot_ms"] > 0 and cell["gamma"] > 0)


def test_arms_draft_as_they_are_named(document: Any) -> None:
    for cell in document["cells"]:
        match cell["arm"]:
            case "target alone":
                assert (cell["alpha"], cell["gamma"]) == (None, 0)
                assert cell["tokens_per_round"] == 1
                assert cell["round_us"]["draft"] == 0
                whole = cell["ttft_ms"]["high"] + (TOKENS - 1) * cell["tpot_ms"]["high"]
                assert (TOKENS - 1) * sum(cell["round_us"].values()) / 1e3 < whole, "a round is one token"
            case "γ = 2":
                assert (cell["drafter"], cell["policy"]) == ("model", "fixed")
                assert 1 <= cell["gamma"] <= 2
                assert 0 < cell["alpha"] <= 1
                assert cell["round_us"]["draft"] > 0
                assert cell["predicted_tpot_ms"] > 0
            case "default policy":
                assert cell["policy"] == "adaptive"
            case _:
                assert cell["drafter"] in ("lookup", "none")  # it may find nothing to copy


def test_settings_and_models_are_in_the_document(document: Any, draft_address: str) -> None:
    assert document["address"] == draft_address
    assert document["settings"]["streams"] == [1, 2]
    assert document["settings"]["drafters"] == ["model", "lookup"]
    assert document["settings"]["prompts"] == "report.jsonl"
    assert document["models"]["target"]["dtype"] == "float32"


def test_stdout_has_a_table_and_a_sentence_for_each_load(done: Result, document: Any) -> None:
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(document["cells"])
    assert len({line.count("|") for line in rows}) == 1
    assert len({len(line) for line in rows}) == 1
    assert "\nPrompts: 2 of 2, the same in all rows.\n" in done.stdout
    for where in ("T = 0, 1 stream: ", "T = 0, 2 streams: ", "T = 1, 1 stream: ", "T = 1, 2 streams: "):
        assert f"\n{where}" in done.stdout


def test_progress_in_a_log_is_a_plain_line_at_each_repeat(done: Result, document: Any) -> None:
    assert not {"\r", "\x1b"}.intersection(done.stderr)
    lines = [line for line in done.stderr.splitlines() if "busy" not in line]
    stages = ["Warm-up: 0 of 72", "Repeat 1 of 2: 24 of 72", "Repeat 2 of 2: 48 of 72", "Repeat 2 of 2: 72 of 72"]
    found = [re.sub(r"^outrider: \d+ s: ", "", line).partition(" texts")[0] for line in lines]
    assert [line for line in found if line in stages] == stages
    assert document["missing"] == []


LONG = ["--gammas", "2", "--drafters", "model", "--temperatures", "0", "--streams", "1,2"]
LONG += ["--texts", "1", "--max-new-tokens", "8", "--repeats", "5000"]


def _stopped(command: Command, stop: Callable[[], None]) -> tuple[int, str, str]:
    """Stops a command, which measures for many minutes, when it has measured each cell once."""
    assert command.process.stderr is not None
    while "Repeat 2 of 5000" not in command.process.stderr.readline():
        assert command.process.poll() is None
    stop()
    return command.ended()


def _partial(ended: tuple[int, str, str], folder: Path) -> str:
    """Checks the reports of a command that was stopped; returns its stderr."""
    _, out, err = ended
    document = json.loads((folder / "report.json").read_text())
    repeats = [cell["repeats"] for cell in document["cells"]]
    assert len(repeats) == 6
    assert 1 <= min(repeats) <= max(repeats) < 5000
    assert max(repeats) - min(repeats) <= 1
    assert all(cell["tokens_per_second"]["median"] > 0 for cell in document["cells"])
    assert len(document["missing"]) == 2
    for sentence in document["missing"]:
        assert "of 5000 repeats" in sentence
        assert f"outrider: not measured: {sentence}\n" in err
    page = (folder / "report.html").read_text()
    assert "The measurement is incomplete" in page
    assert "of 5000 repeats" in page
    assert (folder / "report.md").read_text().strip() in out
    return err


def test_an_interrupt_keeps_what_was_measured(draft_address: str, tmp_path: Path) -> None:
    command = Command("outrider.cli", "bench", "--draft", draft_address, *LONG, "--output", str(tmp_path))

    def interrupt() -> None:
        command.process.send_signal(signal.SIGINT)
        # Again if it goes on, as a user would: asyncio loses a cancellation that meets a result.
        again = Timer(30, command.process.send_signal, [signal.SIGINT])
        again.daemon = True
        again.start()

    ended = _stopped(command, interrupt)
    assert ended[0] == 130
    assert _partial(ended, tmp_path).endswith("outrider: interrupted\n")


def test_a_service_that_dies_leaves_what_was_measured(draft_address: str, tmp_path: Path) -> None:
    with Proxy(draft_address) as proxy:
        command = Command("outrider.cli", "bench", "--draft", proxy.address, *LONG, "--output", str(tmp_path))
        ended = _stopped(command, proxy.close)
    assert ended[0] == 1
    assert f"outrider: UNAVAILABLE: nothing listens at {proxy.address}" in _partial(ended, tmp_path).splitlines()[-1]


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with open_browser() as browser:
        yield browser


_COLOURS = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"


def _lightness(colour: str) -> float:
    return sum(float(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3])


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_errors_and_can_be_read(
    browser: webdriver.Chrome, done: Result, folder: Path, scheme: str
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get((folder / "report.html").as_uri())
    assert errors(browser) == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(each => each.getBoundingClientRect().toJSON())"
    )
    assert [box["width"] > 300 and box["height"] > 200 for box in boxes] == [True, True]
    shown = browser.execute_script("return document.querySelector('figure svg').textContent")
    assert all(arm in shown for arm in ARMS)
    ground, text = map(_lightness, browser.execute_script(_COLOURS))
    assert (ground < 150 < 500 < text) if scheme == "dark" else (text < 150 < 500 < ground)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gammas", "2,x"], "'--gammas': 'x' is not a valid integer range"),
        (["--gammas", "0"], "'--gammas': 0 is not in the range x>=1"),
        (["--streams", "1,,4"], "'--streams': '' is not a valid integer range"),
        (["--temperatures", "0,-1"], "'--temperatures': -1.0 is not in the range 0<=x<=100"),
        (["--temperatures", "nan"], "'--temperatures': nan is not a number"),
        (["--drafters", "modle"], "--drafters: 'modle' is not one of model, ngram"),
        (["--drafters", "none"], "'none' is not one of"),
        (["--prompts-file", "no/such.jsonl"], "no/such.jsonl"),
    ],
)
def test_wrong_usage_names_the_value(arguments: list[str], message: str) -> None:
    refused = _bench(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b'{"text": "caf\xe9"}', "prompts.jsonl is not UTF-8: byte 13 is 0xe9"),
        (b'{"text": "a"}\nplain\n', "line 2 is not JSON"),
        (b'{"prompt": "a"}', "line 1 has neither text nor messages"),
    ],
)
def test_wrong_prompts_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    _failed(_bench("--prompts-file", str(path)), message)


def _failed(refused: Result, message: str) -> None:
    assert (refused.exit_code, refused.stdout) == (1, "")
    (line,) = (line for line in refused.stderr.splitlines() if line.strip() and "retrying" not in line)
    assert line.startswith("outrider: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gammas", "2,300"], "--gammas has 300; the most of these services is 16"),
        (["--drafters", "ngram"], "does not offer ngram; it offers model, "),
    ],
)
def test_what_the_services_cannot_do_is_one_line(
    draft_address: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    _failed(_bench("--draft", draft_address, "--output", str(tmp_path), *arguments), message)


def test_an_address_without_a_draft_service_is_one_line(
    verifier_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RETRY_TIMEOUT_S", 0.2)
    output = ["--output", str(tmp_path)]
    _failed(_bench("--draft", verifier_address, *output), f"{verifier_address} is a verifier, not a draft service")
    _failed(_bench("--draft", "127.0.0.1:1", *output), "nothing listens at 127.0.0.1:1")
