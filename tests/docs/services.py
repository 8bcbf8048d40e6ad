"""The programs of a page: `python` and `outrider`, which start services in the background and run everything else."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.cli.processes import ServiceProcess
from outrider.rpc.channel import wait_for_health
from tests.cluster import FLAGS
from tests.fork_server import ForkedService

START_S = 90.0

_SHIM = """#!/bin/sh
case "$*" in
  *--help* | *--version*) ;;
  "-m draft_service "* | "-m verifier_service "* | "serve "*) exec {python} -S {ask} {socket} "$@" ;;
esac
exec {run} "$@"
"""
_ASK = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(sys.argv[1])
    asked.sendall(json.dumps([os.getcwd(), *sys.argv[2:]]).encode() + b"\\n")
    answer = asked.makefile().read()
sys.exit(answer or None)
"""


class Services:
    """Starts services when a shell asks for them, returns once they are ready, and ends them with the page.

    Attributes:
        programs: the folder that a shell finds `python` and `outrider` in.
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
        (folder / "ask.py").write_text(_ASK, encoding="utf-8")
        self.programs = folder / "bin"
        self.programs.mkdir()
        self._outrider = [sys.executable, "-c", "from outrider.cli import main; main()"]
        self._program("python", sys.executable)
        self._program("outrider", f"{sys.executable} -c 'from outrider.cli import main; main()'")

    def close(self) -> None:
        """End all of them."""
        self._listener.close()
        for command in self._commands:
            command.terminate()
        for service in reversed(self._services):
            service.stop()
        for command in self._commands:
            command.wait(60)

    def _program(self, called: str, run: str) -> None:
        at = {"python": sys.executable, "ask": self._folder / "ask.py", "socket": self._folder / "socket"}
        path = self.programs / called
        path.write_text(_SHIM.format(run=run, **at), encoding="utf-8")
        path.chmod(0o755)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection, connection.makefile("r") as asked:
                    folder, *words = json.loads(asked.readline())
                    connection.sendall(self._start(Path(folder), words).encode())

    def _start(self, folder: Path, words: list[str]) -> str:
        """Return once it is ready, with an error's text where it is not."""
        if words[0] == "-m":
            words = words[1:]
        # The fork server has a working folder of its own.
        flags = [str(folder / word) if (folder / word).exists() else word for word in words[1:]]
        for flag, value in self._defaults[words[0]].items():
            if flag not in flags:
                flags += [flag, value]
        try:
            if words[0] == "serve":
                self._command(flags)
            else:
                service = ForkedService.launch([words[0], *flags, *FLAGS])
                self._services.append(service)
                service.wait_healthy(START_S)
        except Exception as error:
            lines = [line for service in self._services for line in service.log_lines()[-20:]]
            return "\n".join([str(error), *lines])
        return ""

    def _command(self, flags: Sequence[str]) -> None:
        """Run `outrider serve`, which starts both services."""
        log = self._folder / "serve.log"
        with log.open("wb") as output:
            command = subprocess.Popen([*self._outrider, "serve", *flags], stdout=output, stderr=subprocess.STDOUT)
        self._commands.append(command)
        address = flags[flags.index("--listen") + 1]
        end = time.monotonic() + START_S
        while time.monotonic() < end and command.poll() is None:
            with contextlib.suppress(TimeoutError):
                return wait_for_health(address, "", 1.0)
        raise RuntimeError(f"outrider serve is not ready:\n{log.read_text(encoding='utf-8')[-4000:]}")
