"""`outrider generate` against a real pair: its output, labels and refusals."""

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.client import Client

PROMPT = "def add(a, b):\n"
GREEDY = ["--temperature", "0", "--max-new-tokens", "12", "--ignore-eos"]
SIGMOID = ["--rule", "sigmoid", "--sigmoid-scales", "-10", "10"]


@pytest.fixture(scope="module")
def expected(draft_address: str) -> Any:
    """The same text by the client library."""
    with Client(draft_address, timeout=60) as client:
        return client.complete(PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True)


def _generate(address: str, *arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["generate", "--draft", address, *arguments], prog_name="outrider", **options)


def test_text_goes_to_stdout(draft_address: str, expected: Any) -> None:
    """The prompt is an argument, or comes from standard input."""
    for done in (_generate(draft_address, *GREEDY, PROMPT), _generate(draft_address, *GREEDY, "-", input=PROMPT)):
        assert (done.exit_code, done.stdout, done.stderr) == (0, expected.text + "\n", "")


def test_closed_streams_are_empty(draft_address: str) -> None:
    generate = f'exec "$0" -m outrider.cli generate --draft {draft_address} --max-new-tokens 2'
    for redirected, exit_code in (("x >&-", 0), ("- <&-", 1)):
        command = ["sh", "-c", f"{generate} {redirected}", sys.executable]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == exit_code, done.stderr
        assert "Traceback" not in done.stderr


def test_json_has_text_tokens_and_statistics(draft_address: str, expected: Any) -> None:
    arguments = [
        "--top-k",
        "20",
        "--top-p",
        "0.9",
        "--seed",
        "7",
        "--gamma",
        "2",
        "--logprobs",
        "1",
        "--json",
        "--prompt-logprobs",
        "0",
    ]
    done = _generate(draft_address, *GREEDY, *arguments, PROMPT)
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["text"] == expected.text
    assert document["token_ids"] == list(expected.token_ids)
    assert document["finish_reason"] == "length"
    assert (document["seed"], document["rule"]) == (7, "coupled")
    assert len(document["statistics"]["num_accepted_tokens_per_pos"]) <= 2
    assert document["usage"]["completion_tokens"] == 12
    assert [entry["token"]["token_id"] for entry in document["logprobs"]] == list(expected.token_ids)
    scored = [entry["token"]["token_id"] for entry in document["prompt_logprobs"]]
    assert scored == list(expected.started.prompt_token_ids[1:])


def test_samples_are_numbered(draft_address: str) -> None:
    arguments = ["--n", "2", "--seed", "1", "--max-new-tokens", "6", "--ignore-eos"]
    shown = _generate(draft_address, *arguments, PROMPT)
    document = json.loads(_generate(draft_address, *arguments, "--json", PROMPT).stdout)
    first, second = (sample["text"] for sample in document["samples"])
    assert shown.stdout == f"--- 1 of 2 (length)\n{first}\n--- 2 of 2 (length)\n{second}\n"


@pytest.mark.parametrize(
    ("arguments", "lossy_rule"),
    [
        (SIGMOID, "sigmoid"),
        (["--lenience", "0.5"], "tokenwise"),
        ([*SIGMOID, "--temperature", "0"], None),
        (["--rule", "block"], None),
    ],
)
def test_lossy_texts_are_labelled(draft_address: str, arguments: list[str], lossy_rule: str | None) -> None:
    arguments = [*arguments, "--seed", "3", "--max-new-tokens", "8"]
    done = _generate(draft_address, *arguments, PROMPT)
    label = f"outrider: this text is lossy: its distribution is not the target's (rule {lossy_rule})\n"
    assert (done.exit_code, done.stderr) == (0, label if lossy_rule else "")
    document = json.loads(_generate(draft_address, *arguments, "--json", PROMPT).stdout)
    assert document["lossy"] is (lossy_rule is not None)
    assert lossy_rule in (None, document["rule"])
    assert document["text"] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--top-p", "0"], "INVALID_ARGUMENT", "top_p"),
        (["--chat"], "FAILED_PRECONDITION", "chat template"),
    ],
)
def test_a_refusal_is_one_line_with_status_and_field(
    draft_address: str, arguments: list[str], status: str, named: str
) -> None:
    refused = _generate(draft_address, *arguments, PROMPT)
    assert (refused.exit_code, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"outrider: {status}: ")
    assert named in line


def test_the_rule_sigmoid_needs_its_scales() -> None:
    refused = _generate("127.0.0.1:1", "--rule", "sigmoid", PROMPT)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--rule is sigmoid; give --sigmoid-scales ALPHA BETA too" in refused.stderr


def test_json_has_the_speed(draft_address: str) -> None:
    done = _generate(draft_address, "--json", "--max-new-tokens", "8", "--ignore-eos", PROMPT)
    found = json.loads(done.stdout)
    assert found["tokens_per_second"] == pytest.approx(8e6 / found["timings"]["total_us"])
