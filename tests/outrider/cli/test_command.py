"""The command line without services: usage, refusals, and the form of its output."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from draft_service.settings import DraftSettings
from outrider.cli import main, serve
from outrider.cli.options import request_of
from outrider.cli.output import completion_document, write_json
from outrider.cli.serve import split_flags
from outrider.client import Chunk, Completion, Finished, Options, Started
from outrider.environment import COMMANDS, SERVICE_SETTINGS
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import sampling_pb2

SERVE = ["serve", "--target", "a", "--draft", "b"]


def _run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="outrider", **options)


def test_every_command_and_option_has_help() -> None:
    assert sorted(main.commands) == sorted(COMMANDS)
    for name, command in main.commands.items():
        assert f"  {name}  " in _run("--help").output
        assert _run(name, "--help").exit_code == 0
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, f"{name}: {option.name} has no help"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--draft", "nowhere", "x"], "HOST:PORT"),
        (["generate", "--logit-bias", "7", "x"], "ID=BIAS"),
        (["generate", "--system", "Be brief.", "x"], "--chat"),
        (["generate", "--logprobs", "2", "x"], "--json"),
        (["generate", "--prompt-logprobs", "2", "x"], "--prompt-logprobs are part of the JSON output"),
        (["generate", "--timeout", "-1", "x"], "'--timeout': -1.0 is not in the range"),
        (["info", "--timeout", "nan", "127.0.0.1:1"], "'--timeout': nan is not a number"),
        (["gateway", "--http-timeout", "nan"], "'--http-timeout': nan is not a number"),
        (["transcribe", "no/such.wav"], "no/such.wav"),
        (["check", "--draft", "box:50051"], "not a loopback"),
        ([*SERVE, "--listen", "50051"], "HOST:PORT"),
        ([*SERVE, "--ngram-corpus", "no/such.txt"], "no/such.txt"),
        ([*SERVE, "--draft-device", "gpu"], "'--draft-device': 'gpu' is not auto, cpu"),
        ([*SERVE, "--gama", "3"], "no service has a flag --gama; did you mean --gamma"),
        ([*SERVE, "--gamma"], "--gamma needs a value"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_argument(arguments: list[str], message: str) -> None:
    refused = _run(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert message in refused.stderr


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    planned = CliRunner(charset="ascii").invoke(main, ["plan", "--alpha", "0.8", "--c", "0.05"], prog_name="outrider")
    assert planned.exit_code == 0
    assert r"best \u03b3         8:" in planned.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["plan", "--alpha", "0.8", "--c", "0.05"], ["plan", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(OSError), open("/dev/full", "w") as full:  # closing it writes once more
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(arguments, prog_name="outrider")
        assert ended.value.code == 1
    assert capsys.readouterr().err == "outrider: [Errno 28] No space left on device\n"


def test_a_check_whose_result_cannot_be_written_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 would say that the deployment is biased."""

    def fail(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.cli.check._checked", lambda *_: None)
    monkeypatch.setattr("outrider.cli.check.document", lambda report: {})
    monkeypatch.setattr("outrider.cli.check.write_json", fail)
    failed = _run("check", "--json")
    assert (failed.exit_code, failed.stderr) == (2, "outrider: [Errno 28] No space left on device\n")


def test_an_input_that_is_no_text_is_one_line() -> None:
    failed = _run("generate", "-", input=b"caf\xe9")
    assert (failed.exit_code, failed.stderr) == (1, "outrider: standard input is not UTF-8: byte 3 is 0xe9\n")


def test_a_failed_call_exits_with_1_and_one_line() -> None:
    failed = _run("generate", "--draft", "127.0.0.1:1", "--timeout", "0.5", "--json", "x")
    assert (failed.exit_code, failed.stdout) == (1, "")
    *waits, line = failed.stderr.splitlines()
    assert len(waits) <= 1
    assert line.startswith("outrider: ")
    assert "UNAVAILABLE" in line or "DEADLINE_EXCEEDED" in line


def test_options_come_from_the_environment_and_flags_win() -> None:
    environment = {"OUTRIDER_GENERATE_DRAFT": "127.0.0.1:1", "OUTRIDER_GENERATE_RETRY_TIMEOUT": "0"}
    assert _run("generate", "x", env=environment).exit_code == 1
    assert _run("generate", "--draft", "wrong", "x", env=environment).exit_code == 2
    assert "OUTRIDER" not in _run("generate", "x", env=environment).stderr


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("GENERATE_DRFAT", "the nearest name is OUTRIDER_GENERATE_DRAFT"),
        ("GENERAT_DRAFT", "the nearest name is OUTRIDER_GENERATE_DRAFT"),
        ("SERV_VERIFIER_LISTEN", "the nearest name is OUTRIDER_SERVE_VERIFIER_LISTEN"),
        ("RETRY_TIMEOUT", "the nearest name is OUTRIDER_GENERATE_RETRY_TIMEOUT"),
        ("KV_CACH_MB", "the nearest name is OUTRIDER_KV_CACHE_MB"),
        ("SERVE_MAX_SEQUENCES", "the nearest name is OUTRIDER_MAX_SEQUENCES"),
        ("VERSION", "docs/reference/settings.md lists all variables"),
    ],
)
def test_a_variable_that_no_command_and_no_service_has_is_named(variable: str, hint: str) -> None:
    variables = {"OUTRIDER_GENERATE_RETRY_TIMEOUT": "0", f"OUTRIDER_{variable}": "1"}
    warned = _run("generate", "--draft", "127.0.0.1:1", "x", env=variables)
    assert f"outrider: OUTRIDER_{variable} is unknown and is ignored; {hint}\n" in warned.stderr
    assert warned.stderr.count("is unknown") == 1
    assert "UNAVAILABLE" in warned.stderr  # the command runs all the same


def test_no_variable_of_a_command_or_a_service_is_called_unknown() -> None:
    options = [(name, option) for name, command in main.commands.items() for option in command.params]
    names = [f"{command}_{option.name}" for command, option in options if isinstance(option, click.Option)]
    of_kubernetes = ["verifier_service_host", "draft_port_50051_tcp_addr", "draft_service_port_grpc"]
    known = {f"OUTRIDER_{name.upper()}": "1" for name in [*names, *SERVICE_SETTINGS, *of_kubernetes]}
    assert "unknown" not in _run("demo", "--help", env=known).stderr
    assert sorted(main.commands) == sorted(COMMANDS)


def test_serve_passes_each_flag_to_the_services_that_have_it() -> None:
    verifier, draft = split_flags(
        [
            *("--max-sequences", "8", "--log-level=debug", "--trust-remote-code", "--gamma", "3", "--no-prefix-cache"),
            *("--metrics-listen", "127.0.0.1:1", "--verifier-metrics-listen", "127.0.0.1:2"),
            *("--client-rate", "3", "--max-client-sequences=2", "--verifier-client-burst", "7"),
            *("--verifier-timeout", "9", "--draft-revision=main", "--draft-draft-timeout", "5"),
        ]
    )
    both = ["--max-sequences", "8", "--log-level=debug", "--trust-remote-code"]
    assert verifier == [*both, "--no-prefix-cache", "--metrics-listen", "127.0.0.1:2", "--client-burst", "7"]
    assert draft == [
        *both,
        *("--gamma", "3", "--no-prefix-cache", "--metrics-listen", "127.0.0.1:1"),
        *("--client-rate", "3", "--max-client-sequences=2", "--verifier-timeout", "9"),
        *("--revision=main", "--draft-timeout", "5"),
    ]


@pytest.mark.parametrize("variable", [None, "true", "1", "off"])
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--vllm-metrics",),
        ("--no-vllm-metrics",),
        ("--no-vllm-metrics", "--draft-vllm-metrics"),
        ("--verifier-vllm-metrics",),
    ],
)
def test_the_front_of_serve_shows_vllms_metrics_where_its_draft_service_does(
    flags: tuple[str, ...], variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_server(*arguments: object, vllm_metrics: bool) -> None:
        raise click.UsageError(f"vllm_metrics is {vllm_metrics}")

    monkeypatch.setattr(serve, "make_server", make_server)
    if variable is not None:
        monkeypatch.setenv("OUTRIDER_VLLM_METRICS", variable)
    of_draft = DraftSettings.from_command_line(["--model", "x", *split_flags(flags)[1]], program="draft_service")
    done = _run("serve", "--target", "x", "--draft", "x", "--http", "127.0.0.1:0", *flags)
    assert f"vllm_metrics is {of_draft.vllm_metrics}\n" in done.stderr


def test_generate_has_every_option_of_the_client() -> None:
    of_the_command = {"prompt", "draft", "chat", "system", "timeout", "retry_timeout", "as_json"}
    of_the_channel = {"tls", "tls_ca", "tls_cert", "tls_key", "tls_name", "token_file", "plaintext"}
    offered = {str(option.name) for option in main.commands["generate"].params} - of_the_command - of_the_channel
    # Features, resuming and reports are for programs.
    left_out = {"required_features", "committed_token_ids", "held_tokens", "weights_fingerprint"}
    left_out |= {"report_rounds", "report_probabilities", "joined_responses", "fill_context", "metadata"}
    # Those of `transcribe`, and some that it does not need.
    of_speech = {"audio", "sample_rate", "features", "decoder_prompt_token_ids", "language", "task", "timestamps"}
    assert offered == Options.__annotations__.keys() - left_out - of_speech


def test_arguments_of_a_template_are_json_or_text() -> None:
    flags = [f"--template-argument={each}" for each in ("enable_thinking=false", "n=3", 'l=["a"]', "mood=brief")]
    given = main.commands["chat"].make_context("chat", flags).params
    arguments = request_of({"template_arguments": given["template_arguments"]})["template_arguments"]
    assert arguments == {"enable_thinking": False, "n": 3, "l": ["a"], "mood": "brief"}
    assert "'brief' is not NAME=VALUE" in _run("chat", "--template-argument", "brief").stderr
    assert "give --chat too" in _run("generate", "--template-argument", "a=1", "x").stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], {}), (["--outcome-cache"], {"outcome_cache": True}), (["--no-outcome-cache"], {"outcome_cache": False})],
)
def test_switches_that_are_not_given_leave_the_choice_to_the_service(
    flags: list[str], expected: dict[str, bool]
) -> None:
    given = main.commands["generate"].make_context("generate", [*flags, "a prompt"]).params
    assert request_of({name: given[name] for name in ("outcome_cache", "ignore_eos")}) == expected


@pytest.mark.parametrize("line", ["{'a': 1}", "{not json", "Loading."])
def test_serve_prints_lines_that_are_no_log_events_as_they_are(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(serve, "take_over", lambda service: None)
    write = serve._printer()
    write("draft_service", line)
    write("draft_service", json.dumps({"event": "serving", "level": "info"}))
    assert capsys.readouterr().out.startswith(f"draft    | {line}\ndraft    | ")


def test_json_is_one_standard_object(capsys: pytest.CaptureFixture[str]) -> None:
    entry = sampling_pb2.PositionLogprobs(token=sampling_pb2.TokenLogprob(token_id=4, raw=-0.5, adjusted=-math.inf))
    chunk = pb.GenerateChunk(text="γ", token_ids=[4], origins=[pb.TOKEN_ORIGIN_DRAFT], logprobs=[entry])
    end = pb.GenerateFinished(finish_reason=sampling_pb2.FINISH_REASON_STOP_STRING, stop="END")
    started = Started.of(pb.GenerateStarted(request_id="r", seed=2**64 - 1))
    write_json(completion_document(Completion.of([started, Chunk.of(chunk), Finished.of(end)])))
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert (document["text"], document["token_ids"], document["seed"]) == ("γ", [4], 2**64 - 1)
    assert (document["finish_reason"], document["stop"]) == ("stop_string", "END")
    assert document["logprobs"][0]["token"] == {"token_id": 4, "raw": -0.5, "adjusted": None}
    assert "samples" not in document


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1", "cp1252"])
def test_json_is_utf_8_or_ascii(charset: str) -> None:
    """JSON readers expect UTF-8. Python's escapes of characters that an encoding lacks are not valid JSON."""

    @click.command()
    def command() -> None:
        write_json({"text": "é 😀 ✓"})

    written = CliRunner(charset=charset).invoke(command).stdout_bytes
    assert json.loads(written) == {"text": "é 😀 ✓"}
    assert (b"\\u" in written) == (charset != "utf-8")


def test_convert_looks_for_the_folder_first() -> None:
    done = CliRunner().invoke(main, ["convert", "no/such/model", "/nonexist/t.gguf"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "OUT.gguf is /nonexist/t.gguf: there is no folder /nonexist; make it first" in done.stderr
