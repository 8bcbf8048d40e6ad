"""The client, as tests see it: orders for the program on its host (`tests.hosts.agent`), and its output so far."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from outrider.cli.processes import service_environment
from tests.machine import TOOLS
from tests.metrics import Samples

SOON_S = 120.0


@dataclass
class Answer:
    """What has come of an order so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: Any = None  # of a text, how often it changed services
    error: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> Any:
        """What it ended with; it must not have failed."""
        assert self.ended.wait(SOON_S), f"no end, after {len(self.token_ids)} tokens"
        assert not self.error, self.error
        return self.end

    def take(self, message: dict[str, Any]) -> None:
        self.token_ids += message.get("token_ids", ())
        self.text += message.get("text", "")
        if "end" in message or "error" in message:
            self.end, self.error = message.get("end"), message.get("error", "")
            self.ended.set()


@dataclass(frozen=True)
class Request:
    """A text to ask for."""

    prompt: str
    options: dict[str, Any]


class RemoteClient:
    """A client library elsewhere. A context manager; any thread may ask it."""

    def __init__(self, entering: Sequence[str], address: str, tls: dict[str, str]) -> None:
        """`entering` is what a command begins with that runs on its host; `tls` are the arguments of `TLS`."""
        self._command = [*entering, sys.executable, "-m", "tests.hosts.agent", address, json.dumps(tls)]
        self._numbers = itertools.count()
        self._answers: dict[int, Answer] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**TOOLS, **service_environment(1)},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def write(self, request: Request) -> Answer:
        """Asks for a text, and returns at once."""
        return self._order("write", prompt=request.prompt, options=request.options)

    def scrape(self, url: str) -> Samples:
        """As `tests.metrics.scrape`, from there."""
        found = self._order("scrape", url=url).wait()
        return {name: {tuple(map(tuple, labels)): value for labels, value in each} for name, each in found}

    def _order(self, what: str, **order: Any) -> Answer:
        answer, number = Answer(), next(self._numbers)
        assert self._process.stdin is not None
        with self._lock:
            self._answers[number] = answer
            self._process.stdin.write(json.dumps({"number": number, "what": what, "order": order}) + "\n")
            self._process.stdin.flush()
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            self._answers[message.pop("order")].take(message)
        for answer in self._answers.values():
            if not answer.ended.is_set():
                answer.take({"error": "the client has ended"})
