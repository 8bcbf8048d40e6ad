"""`outrider gateway` as a user runs it. docs/how-to/openai.md runs `outrider serve --http`."""

import fcntl
import logging
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner

from outrider.cli import main
from outrider.http import server
from tests.cluster import free_address
from tests.commands import Command


def _url(command: Command, pattern: str) -> str:
    assert command.process.stderr is not None
    for line in command.process.stderr:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"ended with {command.ended()}")


def test_a_gateway_answers_until_sigterm(draft_address: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    flags = ("--draft", draft_address, "--http", "127.0.0.1:0", "--http-key-file", str(keys), "--http-model", "mine")
    names = ("--http-allowed-host", "API.Example.org.", "--http-cors-origin", "https://Good.example:443/",
             "--http-cors-origin", "tauri://localhost", "--http-cors-origin", "null")  # fmt: skip
    command = Command("outrider.cli", "gateway", *flags, *names, "--frame-bytes", "512", "--vllm-metrics")
    url = _url(command, r"at (http://\S+)/v1")
    headers = {"authorization": "Bearer a-key-of-some-length"}
    assert "--frame-bytes" in httpx.get(url).text, "the reason why the playground is off"
    assert 'vllm:num_requests_running{model_name="mine"} 0.0' in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/health", headers={"host": "api.example.org"}).status_code == 200, "names have no case"
    for origin in ("https://good.example", "tauri://localhost", "null"):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert httpx.options(f"{url}/v1/completions", headers=asked).status_code == 200, origin
    body = {"model": "mine", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines), "the answer in progress ends"
    code, out, err = command.ended()
    assert (code, out, err) == (0, "", "Stopped.\n")


def test_a_full_pipe_of_the_log_blocks_no_answer() -> None:
    flags = ("--draft", free_address(), "--http", "127.0.0.1:0", "--retry-timeout", "0")
    command = Command("outrider.cli", "gateway", *flags)
    url = _url(command, r"at (http://\S+)/v1")
    assert command.process.stderr is not None
    size = fcntl.fcntl(command.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    with httpx.Client(timeout=20) as client:
        written = 0
        while written < 4 * size:
            response = client.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503
            written += len("a request failed with 503")  # at least
        assert client.get(f"{url}/health").status_code == 503
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.ended()
    assert code == 0
    assert "a request failed with 503" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--http", "0.0.0.0:0"), 2, "--http 0.0.0.0:0 is not a loopback address"),
        (("--http", "127.0.0.1:0", "--http-tls-key", __file__), 2, "--http-tls-key needs --http-tls-cert"),
        (("--http", "127.0.0.1:0", "--http-key-file", __file__), 2, "is not a token"),
        (("--http", "nowhere"), 2, "is not HOST:PORT"),
        (("--http-grace", "0.5"), 2, "0.5 is not in the range x>=1"),
        (("--http-allowed-host", "b.org:443"), 2, "'--http-allowed-host': b.org:443 is no name alone"),
        (("--http-allowed-host", "api.*"), 2, "'--http-allowed-host': api.* is no name alone"),
        (("--http-allowed-host", "*."), 2, "'--http-allowed-host': *. is no name alone"),
        (("--http-cors-origin", "b.org"), 2, "'--http-cors-origin': b.org is not an origin"),
        (("--http-cors-origin", "://b.org"), 2, "'--http-cors-origin': ://b.org is not an origin"),
        (("--http-cors-origin", "https://"), 2, "'--http-cors-origin': https:// is not an origin"),
        (("--http-cors-origin", "https://b.org/app"), 2, "'--http-cors-origin': https://b.org/app is not an origin"),
        (("--http", "unix:/tmp/x"), 2, "--http: 'unix:/tmp/x' is not HOST:PORT"),
        (("--http", "203.0.113.1:1", "--http-plaintext"), 1, "cannot listen at 203.0.113.1:1"),
    ],
)
def test_wrong_options_end_the_command_in_one_line(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = CliRunner().invoke(main, ["gateway", *arguments])
    assert done.exit_code == code
    assert words in done.stderr


def test_serve_with_tls_asks_for_a_gateway() -> None:
    pair = ("--target", "x", "--draft", "x", "--http", "127.0.0.1:0", "--tls-cert", __file__, "--tls-key", __file__)
    done = CliRunner().invoke(main, ["serve", *pair])
    assert done.exit_code == 2
    assert "outrider gateway" in done.stderr


def test_the_front_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("outrider.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(main, ["gateway", "--http", "127.0.0.1:0"])
    assert done.exit_code == 1
    assert "pip install -e '.[http]'" in done.stderr


def test_garbage_on_many_connections_writes_one_line_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now))
    one_a_second = server._OneASecond()

    def passes(level: int) -> bool:
        return one_a_second.filter(logging.LogRecord("uvicorn.error", level, "", 0, "Invalid HTTP request", (), None))

    assert [passes(logging.WARNING) for _ in range(3)] == [True, False, False]
    assert passes(logging.ERROR)
    now += 1.5
    assert passes(logging.WARNING)
