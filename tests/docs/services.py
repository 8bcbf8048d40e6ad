"""`python`, `outrider` and `smg` for a page: they start servers in the background, and run everything else."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.request import Request, urlopen

from outrider.cli.processes import ServiceProcess
from outrider.rpc.channel import wait_for_health
from tests.cluster import FLAGS, free_address
from tests.fork_server import ForkedService
from tests.machine import absent

START_S = 90.0
OUTRIDER = (sys.executable, "-c", "from outrider.cli import main; main()")
# `outrider serve` with services from the fork server: its own test starts them as its user does.
_SERVE = """
from outrider.cli import main, processes
from tests.fork_server import ForkedService
processes.ServiceProcess = ForkedService
main()
"""

_PROGRAM = """#!/bin/sh
case "$*" in
  *--help* | *--version*) ;;
  "-m draft_service "* | "-m verifier_service "* | "serve "* | "gateway "*)
    exec {python} -S {folder}/start.py {folder}/socket "$@" ;;
  "launch "*) exec {python} -S {folder}/start.py {folder}/socket smg "$@" ;;
esac
exec {command} "$@"
"""
# smg looks for its workers every few seconds by default.
_SMG_FLAGS = {
    "--host": "127.0.0.1",
    "--health-check-interval-secs": "1",
    "--health-success-threshold": "1",
    "--worker-startup-check-interval": "1",
}
_START = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(json.dumps([os.getcwd(), *sys.argv[2:]]).encode() + b"\\n")
    error = connection.makefile().read()
sys.exit(error or None)
"""


def find_smg() -> str:
    """The program; the test is skipped where it is not installed."""
    beside = Path(sys.executable).parent
    return shutil.which("smg", path=f"{beside}{os.pathsep}{os.environ['PATH']}") or absent(
        "smg is not installed; there are wheels for few platforms"
    )


class Services:
    """Starts servers when a shell runs their command, returns once they are ready, and ends them with the page.

    Attributes:
        programs: the folder of the programs, for a shell's PATH.
    """

    def __init__(self, folder: Path, defaults: Mapping[str, Mapping[str, str]]) -> None:
        """`defaults` are the flags of `draft_service`, `verifier_service` and `serve` that a page leaves out."""
        self._folder = folder
        self._defaults = defaults
        self._services: list[ServiceProcess] = []
        self._commands: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        (folder / "start.py").write_text(_START, encoding="utf-8")
        self.programs = folder / "bin"
        self.programs.mkdir()
        outrider = shlex.join(OUTRIDER)
        for name, command in (("python", sys.executable), ("outrider", outrider), ("smg", "false")):
            program = self.programs / name
            text = _PROGRAM.format(python=sys.executable, folder=folder, command=command)
            program.write_text(text, encoding="utf-8")
            program.chmod(0o755)

    def close(self) -> None:
        self._listener.close()
        self._end_commands()
        for service in reversed(self._services):
            service.stop()

    def _end_commands(self) -> None:
        for command in reversed(self._commands):
            command.terminate()
            try:
                command.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, signal.SIGKILL)
        self._commands.clear()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection, connection.makefile("r") as request:
                    folder, *words = json.loads(request.readline())
                    connection.sendall(self._start(Path(folder), words).encode())

    def _start(self, folder: Path, words: list[str]) -> str:
        """Return once it is ready, with the text of an error if it is not."""
        name, *flags = words[1:] if words[0] == "-m" else words
        # The fork server has a working folder of its own.
        flags = [str(folder / flag) if (folder / flag).exists() else flag for flag in flags]
        for flag, value in self._defaults.get(name, {}).items():
            if flag not in flags:
                flags += [flag, value]
        try:
            if name == "serve":
                self._run_serve(flags)
            elif name == "gateway":
                self._run_gateway(flags)
            elif name == "smg":
                self._run_smg(flags)
            else:
                self._end_commands()  # `outrider serve` of an earlier block, which has the same addresses
                service = ForkedService.launch([name, *flags, *FLAGS])
                self._services.append(service)
                service.wait_healthy(START_S)
        except Exception as error:
            lines = [line for service in self._services for line in service.log_lines()[-20:]]
            return "\n".join([str(error), *lines])
        return ""

    def _run_serve(self, flags: Sequence[str]) -> None:
        address = flags[flags.index("--listen") + 1]
        self._run([sys.executable, "-c", _SERVE, "serve", *flags], lambda: wait_for_health(address, "", 1.0))

    def _run_gateway(self, flags: Sequence[str]) -> None:
        scheme = "https" if "--http-tls-cert" in flags else "http"
        url = f"{scheme}://{flags[flags.index('--http') + 1]}/health"
        self._run([*OUTRIDER, "gateway", *flags], lambda: _ask(url))

    def _run_smg(self, flags: Sequence[str]) -> None:
        more = {**_SMG_FLAGS, "--prometheus-port": free_address().rpartition(":")[2]}
        url = f"http://127.0.0.1:{flags[flags.index('--port') + 1]}/v1/completions"
        body = json.dumps({"model": "target", "prompt": "x", "max_tokens": 1}).encode()
        self._run([find_smg(), *flags, *(word for flag in more.items() for word in flag)], lambda: _ask(url, body))

    def _run(self, command: Sequence[str], ask: Callable[[], object]) -> None:
        """Run a command in the background, until the page ends; return once `ask` raises no error."""
        log = self._folder / f"{len(self._commands)}.log"
        with log.open("wb") as output:
            # A group of its own. There is no network in tests, so no cache of the hub.
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder / "clone",
                env={**os.environ, "HF_HOME": str(self._folder / "empty-hub")},
                start_new_session=True,
            )
        self._commands.append(process)
        end = time.monotonic() + START_S
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError, TimeoutError):
                ask()
                return
            time.sleep(0.1)
        raise RuntimeError(f"{command[-1]} is not ready:\n{log.read_text(encoding='utf-8')[-4000:]}")


def _ask(url: str, body: bytes | None = None) -> None:
    """Raise OSError unless the answer is a success."""
    anyone = ssl._create_unverified_context() if url.startswith("https:") else None
    request = Request(url, body, {"content-type": "application/json"})
    with urlopen(request, timeout=10.0, context=anyone) as answer:
        answer.read()
