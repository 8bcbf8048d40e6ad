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

_PROGRAM = """#!/bin/sh
case "$*" in
  *--help* | *--version*) ;;
  "-m draft_service "* | "-m verifier_service "* | "serve "*) exec {python} -S {folder}/start.py {folder}/socket "$@" ;;
esac
exec {command} "$@"
"""
_START = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(json.dumps([os.getcwd(), *sys.argv[2:]]).encode() + b"\\n")
    error = connection.makefile().read()
sys.exit(error or None)
"""


class Services:
    """Starts services when a shell runs their command, returns once they are ready, and ends them with the page.

    Attributes:
        programs: the folder of `python` and `outrider`, for a shell's PATH.
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
        outrider = f"{sys.executable} -c 'from outrider.cli import main; main()'"
        for name, command in (("python", sys.executable), ("outrider", outrider)):
            program = self.programs / name
            text = _PROGRAM.format(python=sys.executable, folder=folder, command=command)
            program.write_text(text, encoding="utf-8")
            program.chmod(0o755)

    def close(self) -> None:
        self._listener.close()
        for service in reversed(self._services):
            service.stop()
        self._end_commands()

    def _end_commands(self) -> None:
        for command in self._commands:
            command.terminate()
            command.wait(60)
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
        for flag, value in self._defaults[name].items():
            if flag not in flags:
                flags += [flag, value]
        try:
            if name == "serve":
                self._run_serve(flags)
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
        log = self._folder / "serve.log"
        program = [sys.executable, "-c", "from outrider.cli import main; main()"]
        with log.open("wb") as output:
            command = subprocess.Popen([*program, "serve", *flags], stdout=output, stderr=subprocess.STDOUT)
        self._commands.append(command)
        address = flags[flags.index("--listen") + 1]
        end = time.monotonic() + START_S
        while time.monotonic() < end and command.poll() is None:
            with contextlib.suppress(TimeoutError):
                return wait_for_health(address, "", 1.0)
        raise RuntimeError(f"outrider serve is not ready:\n{log.read_text(encoding='utf-8')[-4000:]}")
