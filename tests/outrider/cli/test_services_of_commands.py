"""`demo` and `serve` as a user runs them: services come up as processes, and none outlives the command."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cli import demo, main, processes, serve
from tests.certificates import Authority
from tests.cluster import MODELS, free_address
from tests.commands import Command, linux
from tests.fork_server import ForkedService, noting
from tests.project.tree import ROOT

PAIR = ["--target", str(MODELS / "target"), "--draft", str(MODELS / "draft"), "--threads", "1"]
SPEECH = ROOT / "models" / "speech"
ANYWHERE = ("--listen", "127.0.0.1:0", "--verifier-listen", "127.0.0.1:0")
BLOCK = """
import os, sys
sys.modules["triton"] = sys.modules["accelerate"] = sys.modules["scipy"] = None
with open(f"{__file__}.{os.getpid()}", "w") as file:
    file.write(os.environ.get("GOMP_SPINCOUNT", ""))
"""


@pytest.fixture
def two_forked_services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Services of a command in this process are forked. The test fails unless the command starts two and ends both."""
    started: list[ForkedService] = []
    monkeypatch.setattr(processes, "ServiceProcess", noting(started))
    yield
    assert len(started) == 2
    assert None not in [service.returncode for service in started]


@pytest.mark.usefixtures("two_forked_services")
def test_the_demo_compares_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "busy_processors", lambda: 0.0)
    arguments = ("--json", "--max-new-tokens", "16", "--repeats", "1", "--threads", "1")
    done = CliRunner().invoke(main, ["demo", *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["finish_reason"] in {"length", "stop_token"}
    assert document["pair"]["tokens"] == document["target_alone"]["tokens"] == len(document["token_ids"])
    assert document["ratio"] > 0
    assert document["rounds"][0]["output_length"] == 0
    assert len(document["rounds"]) == document["statistics"]["num_rounds"]


@linux
def test_serve_answers_until_sigterm_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another drafter, flags and variables of the services, TLS and a token; without what only some machines have:
    on a CPU torch brings no triton, a target on one device needs no package for several, and none needs scipy.
    """
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    authority, tokens = Authority(tmp_path / "pki"), tmp_path / "tokens"
    server, client = authority.issue("127.0.0.1"), authority.issue("me")
    tokens.write_text("a-token-of-some-length\n")
    security = ["--tls-client-ca", str(authority.pem), "--allow-client-san", "me"]
    variables: dict[str, object] = {"TLS_CERT": server.cert, "SERVE_TLS_KEY": server.key, "AUTH_TOKEN_FILE": tokens}
    drafting = ("--drafter", "staged", "--staged-by", "ngram", "--ngram-corpus", __file__)
    probed = [free_address(), free_address()]
    flags = ["--max-sequences", "3", "--draft-gamma", "2"]
    flags += ["--verifier-health-listen", probed[1]]
    variables |= {"HEALTH_LISTEN": probed[0], "METRICS_LISTEN": "127.0.0.1:0", "VERIFIER_TLS_CA": authority.pem}
    environment = {f"OUTRIDER_{name}": str(value) for name, value in variables.items()} | {"PYTHONPATH": path}
    command = Command("outrider.cli", "serve", *PAIR, *drafting, *ANYWHERE, *security, *flags, **environment)
    assert command.process.stderr is not None
    line = command.process.stderr.readline()
    found = re.search(r"^Serving at (127\.0\.0\.1:\d+)\.$", line)
    assert found, line
    credentials = ["--tls-ca", str(authority.pem), "--tls-cert", str(client.cert), "--tls-key", str(client.key)]
    credentials += ["--token-file", str(tokens)]
    arguments = ["generate", "--draft", found[1], "--max-new-tokens", "4", "--json", "def f():", *credentials]
    answer = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["drafter"] == "staged"
    shown = json.loads(CliRunner().invoke(main, ["info", found[1], "--json", *credentials]).stdout)
    assert (shown["service"], shown["model"]["limits"]["max_sequences"]) == ("draft service", 3)
    assert len(command.left_behind()) == 3
    spins = {file.read_text() for file in tmp_path.glob("sitecustomize.py.*")}
    assert spins == {"", str(processes.DRAFT_SPINS), str(processes.TARGET_SPINS)}, "of the command and of its services"
    command.process.send_signal(signal.SIGTERM)
    code, out, err = command.ended()
    assert (code, err) == (0, "Stopped.\n")
    lines = [json.loads(line) for line in out.splitlines()]
    health = {line["service"]: line["address"] for line in lines if line["event"] == "health"}
    assert [line["service"] for line in lines if line["event"] == "metrics"] == ["draft_service"]
    assert health == dict(zip(("draft_service", "verifier_service"), probed, strict=True))
    for service in ("verifier_service", "draft_service"):
        events = [line["event"] for line in lines if line["service"] == service]
        assert events.index("listening") == (service == "draft_service"), "first, but for the metrics"
        assert events.index("serving") < events.index("stopped")
    assert command.left_behind() == []


@pytest.mark.usefixtures("two_forked_services")
@pytest.mark.parametrize(
    ("models", "command"), [(MODELS, r'generate --draft \S+ "def add'), (SPEECH, r"transcribe --draft \S+ FILE$")]
)
def test_serve_suggests_a_command_and_fails_in_one_line_when_its_front_ends(
    models: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ValueError("the token file\nis gone")

    monkeypatch.setattr(serve, "AsyncClient", broken)
    pair = ["--target", str(models / "target"), "--draft", str(models / "draft"), "--threads", "1"]
    done = CliRunner().invoke(main, ["serve", *pair, *ANYWHERE, "--http", "127.0.0.1:0"])
    assert done.exit_code == 1
    assert re.search(rf"^Serving at 127.0.0.1:\d+. Try: outrider {command}", done.stderr, re.MULTILINE)
    assert re.search(
        r"^outrider: the HTTP front at http://127.0.0.1:\d+ ended: the token file is gone$", done.stderr, re.MULTILINE
    )


@pytest.mark.usefixtures("two_forked_services")
def test_serve_fails_in_one_line_where_a_model_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "nothing-here"
    done = CliRunner().invoke(main, ["serve", "--target", str(missing), "--draft", str(MODELS / "draft"), *ANYWHERE])
    assert done.exit_code == 1
    (last,) = done.stderr.splitlines()
    assert last.startswith("outrider: verifier_service ended with exit code 1: ")
    assert str(missing) in last
