"""The command line: what it takes, what it refuses, and how it answers. No service runs behind these tests."""

import json
import math
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.cli.output import completion_document, write_json
from outrider.cli.serve import shared_out
from outrider.client import Chunk, Completion, Finished, Options, Started
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import sampling_pb2

COMMANDS = ["chat", "demo", "generate", "info", "serve"]


def _run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="outrider", **options)


def test_help_names_every_command_and_every_command_explains_itself() -> None:
    listed = _run("--help")
    assert listed.exit_code == 0
    assert sorted(main.commands) == COMMANDS
    for name in COMMANDS:
        assert f"  {name}  " in listed.output
        shown = _run(name, "--help")
        assert shown.exit_code == 0
        assert "\\b" not in listed.output + shown.output
        for option in main.commands[name].params:
            assert not isinstance(option, click.Option) or option.help, f"{name}: {option.name} has no help"


def test_examples_stand_on_lines_of_their_own() -> None:
    assert '\n  outrider generate "def add(a, b):"\n' in _run("--help").output
    assert '\n  outrider generate --temperature 0 "def add(a, b):"\n' in _run("generate", "--help").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "PROMPT"),
        (["generate", "--draft", "nowhere", "x"], "HOST:PORT"),
        (["generate", "--temperature", "hot", "x"], "hot"),
        (["generate", "--logit-bias", "7", "x"], "ID=BIAS"),
        (["generate", "--system", "Be brief.", "x"], "--chat"),
        (["generate", "--logprobs", "2", "x"], "--json"),
        (["serve"], "--target"),
        (["serve", "--target", "a", "--draft", "b", "--listen", "50051"], "HOST:PORT"),
        (["serve", "--target", "a", "--draft", "b", "--ngram-corpus", "no/such.txt"], "no/such.txt"),
        (
            ["serve", "--target", "a", "--draft", "b", "--draft-device", "gpu"],
            "'--draft-device': 'gpu' is not auto, cpu",
        ),
        (
            ["serve", "--target", "a", "--draft", "b", "--gama", "3"],
            "no service has a flag --gama; did you mean --gamma",
        ),
        (["serve", "--target", "a", "--draft", "b", "--gamma"], "--gamma needs a value"),
        (["info"], "HOST:PORT"),
        (["demo", "--repeats", "0"], "repeats"),
        (["paint"], "paint"),
    ],
)
def test_wrong_usage_is_2_and_says_what(arguments: list[str], said: str) -> None:
    refused = _run(*arguments)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_failure_is_one_line_and_1_after_one_that_says_that_it_waits(extra: list[str]) -> None:
    failed = _run("generate", "--draft", "127.0.0.1:1", "--timeout", "0.5", *extra, "x")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    *waits, line = failed.stderr.splitlines()
    assert len(waits) <= 1
    assert line.startswith("outrider: ")
    assert "UNAVAILABLE" in line or "DEADLINE_EXCEEDED" in line


def test_options_come_from_the_environment_and_flags_win() -> None:
    environment = {"OUTRIDER_GENERATE_DRAFT": "127.0.0.1:1", "OUTRIDER_GENERATE_PATIENCE": "0"}
    assert _run("generate", "x", env=environment).exit_code == 1
    assert _run("generate", "--draft", "wrong", "x", env=environment).exit_code == 2


def test_a_mistyped_variable_is_named_with_the_nearest_option() -> None:
    said = _run("generate", "x", env={"OUTRIDER_GENERATE_DRFAT": "a:1", "OUTRIDER_GENERATE_PATIENCE": "0"}).stderr
    assert "OUTRIDER_GENERATE_DRFAT is no option and is ignored; the nearest is OUTRIDER_GENERATE_DRAFT\n" in said
    assert "OUTRIDER_GENERATE_PATIENCE" not in said


def test_flags_of_the_services_go_to_those_that_have_them() -> None:
    verifier, draft = shared_out(
        [
            *("--max-sequences", "8", "--log-level=debug", "--trust-remote-code", "--gamma", "3", "--no-prefix-cache"),
            *("--metrics-listen", "127.0.0.1:1", "--verifier-metrics-listen", "127.0.0.1:2"),
            *("--verifier-timeout", "9", "--draft-revision=main", "--draft-draft-timeout", "5"),
        ]
    )
    both = ["--max-sequences", "8", "--log-level=debug", "--trust-remote-code"]
    assert verifier == [*both, "--no-prefix-cache", "--metrics-listen", "127.0.0.1:2"]
    assert draft == [
        *both,
        *("--gamma", "3", "--metrics-listen", "127.0.0.1:1", "--verifier-timeout", "9", "--revision=main"),
        *("--draft-timeout", "5"),
    ]


def test_every_option_of_generate_is_one_of_the_client() -> None:
    own = {"prompt", "draft", "chat", "system", "timeout", "patience", "as_json"}
    # Of the client itself, not of a request.
    own |= {"tls", "tls_ca", "tls_cert", "tls_key", "tls_name", "token_file", "plaintext"}
    offered = {str(option.name) for option in main.commands["generate"].params} - own
    # What a command line is not for: features, resuming, and what demo shows.
    left_out = {"required_features", "committed_token_ids", "held_tokens", "weights_fingerprint", "report_rounds"}
    assert offered == Options.__annotations__.keys() - left_out


def test_json_is_one_object_that_any_reader_takes(capsys: pytest.CaptureFixture[str]) -> None:
    entry = sampling_pb2.PositionLogprobs(token=sampling_pb2.TokenLogprob(token_id=4, raw=-0.5, adjusted=-math.inf))
    chunk = pb.GenerateChunk(text="γ", token_ids=[4], origins=[pb.TOKEN_ORIGIN_DRAFT], logprobs=[entry])
    end = pb.GenerateFinished(finish_reason=sampling_pb2.FINISH_REASON_STOP_STRING, stop="END")
    started = Started.of(pb.GenerateStarted(request_id="r", seed=2**64 - 1))
    write_json(completion_document(Completion.of([started, Chunk.of(chunk), Finished.of(end)])))
    (line,) = capsys.readouterr().out.splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(line, parse_constant=refuse)
    assert (document["text"], document["token_ids"], document["seed"]) == ("γ", [4], 2**64 - 1)
    assert (document["finish_reason"], document["stop"]) == ("stop_string", "END")
    assert document["logprobs"][0]["token"] == {"token_id": 4, "raw": -0.5, "adjusted": None}
    assert "samples" not in document
