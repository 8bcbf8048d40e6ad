"""A headless Chromium that opens pages, driven by its DevTools protocol over two pipes."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ANSWER_S = 60.0

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One tab. Whatever a page reports while it is open is in `errors`."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        self.errors: list[str] = []
        self._messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._number = 0
        self._session: str | None = None
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # Chromium reads commands at descriptor 3 and writes answers at 4.
        redirected = 'commands=$1 answers=$2; shift 2; eval "exec \\"\\$@\\" 3<&$commands 4>&$answers"'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                redirected,
                "bash",
                str(commands),
                str(answers),
                PROGRAM,
                *_FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        threading.Thread(target=self._read, daemon=True).start()
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(ANSWER_S)
        os.close(self._out)

    def open(self, url: str) -> None:
        """Open a page and wait until it has loaded what it asks for at first."""
        self.errors.clear()
        self._ask("Page.navigate", url=url)
        self.wait_until(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")
        # What scripts throw a moment later counts too.
        self.evaluate("new Promise(done => setTimeout(done, 300))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        answer = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        end = time.monotonic() + ANSWER_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            try:
                answer = self._messages.get(timeout=ANSWER_S)
            except Empty:
                raise AssertionError(f"Chromium does not answer {method}; exit code {self._process.poll()}") from None
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        describe = _EVENTS.get(event.get("method", ""))
        if describe is not None and (text := describe(event["params"])):
            self.errors.append(text)

    def _read(self) -> None:
        with os.fdopen(self._in, "rb") as stream:
            rest = b""
            while chunk := stream.read1(65536):
                *whole, rest = (rest + chunk).split(b"\0")
                for message in whole:
                    self._messages.put(json.loads(message))


def _console(parameters: dict[str, Any]) -> str:
    if parameters["type"] not in ("error", "warning", "assert"):
        return ""
    return " ".join(str(each.get("value", each.get("description"))) for each in parameters["args"])


def _exception(parameters: dict[str, Any]) -> str:
    return json.dumps(parameters["exceptionDetails"])


def _entry(parameters: dict[str, Any]) -> str:
    """A failed request, among others."""
    entry = parameters["entry"]
    return f"{entry['text']} {entry.get('url', '')}" if entry["level"] in ("error", "warning") else ""


_EVENTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "Runtime.consoleAPICalled": _console,
    "Runtime.exceptionThrown": _exception,
    "Log.entryAdded": _entry,
}
