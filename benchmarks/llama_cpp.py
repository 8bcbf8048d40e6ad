"""llama.cpp's own server as a contender, on GGUF files of the same pair.

It is given token ids and returns token ids, so it writes the same texts as the others. A single text is timed by the
server's own clock, from its slot's start to the last token: HTTP costs it nothing.
"""

import json
import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.contenders import Outcome, Task, Unavailable, checked, text_run
from benchmarks.harness import CACHE, Json, digest_of
from benchmarks.services import Models, http_server
from outrider.cli.processes import ServiceError
from outrider.evaluation.streams import Served

SERVER_VARIABLE, SERVER_NAME = "LLAMA_SERVER", "llama-server"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class GGUFPair:
    target: Path
    draft: Path


def find_server() -> str:
    """The path of llama.cpp's server; raises `Unavailable` where there is none, or no extra `llama`."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"the extra llama is not installed: {error}") from error
    found = os.environ.get(SERVER_VARIABLE) or shutil.which(SERVER_NAME)
    if found is None or not os.access(found, os.X_OK):
        raise Unavailable(
            f"there is no program {found or SERVER_NAME}; see docs/how-to/llama-cpp.md, or set {SERVER_VARIABLE}"
        )
    return found


def gguf_pair(models: Models, kind: str = "bf16") -> GGUFPair:
    """Both models as GGUF files, made once by `outrider convert`; a model trained again is converted again."""
    return GGUFPair(*(_converted(folder, kind) for folder in (models.target, models.draft)))


def _converted(folder: Path, kind: str) -> Path:
    from outrider.runtime.gguf_convert import convert

    path = CACHE / f"{folder.name}-{digest_of(folder)}-{kind}.gguf"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        convert(str(folder), path, kind)
    return path


class LlamaServer:
    """A process of llama.cpp's server, as a context manager that stops it.

    Args:
        binary: of the server.
        pair: the models.
        threads: of the target, and of the draft.
        longest: tokens of a sequence.
        parallel: how many sequences run at once.
        draft_tokens: the most tokens that the draft proposes; 0: the target alone.
        least_chance: the draft stops before a token of lower probability.
    """

    def __init__(
        self,
        binary: str,
        pair: GGUFPair,
        *,
        threads: int,
        longest: int,
        parallel: int = 1,
        draft_tokens: int = 0,
        least_chance: float = 0.0,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self.how: Json = {"threads": threads, "parallel": parallel}
        flags = {
            "-m": pair.target, "-t": threads, "-tb": threads, "-np": parallel, "-c": parallel * longest,
            "--host": "127.0.0.1", "--port": port, "--cache-ram": 0, "--ctx-checkpoints": 0,
        }  # fmt: skip
        if draft_tokens:
            self.how |= {"draft_tokens": draft_tokens, "least_chance": least_chance}
            flags |= {
                "-md": pair.draft, "--spec-type": "draft-simple", "-td": threads, "-tbd": threads,
                "--spec-draft-n-max": draft_tokens, "--spec-draft-p-min": least_chance,
            }  # fmt: skip
        self._command = [binary, *(str(part) for flag in flags.items() for part in flag), "--no-webui"]

    def __enter__(self) -> Self:
        self._running = ExitStack()
        try:
            self._running.enter_context(http_server(self._command, self._url))
        except ServiceError as error:
            raise Unavailable(f"llama-server did not start: {error}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def complete(self, task: Task) -> Json:
        """The server's answer. Nothing is filtered, and no token ends the text."""
        body = {
            "prompt": list(task.token_ids), "n_predict": task.new_tokens, "ignore_eos": True, "seed": task.seed,
            "temperature": task.temperature, "samplers": ["temperature"], "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        asked = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
            found: Json = json.load(answer)
        return found

    # ---------------------------------------------------------------------------------------------- as a contender

    def write(self, task: Task) -> Json:
        """One text, see `Write`."""
        found = self.complete(task)
        times = found["timings"]
        drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        return text_run(
            "llama.cpp",
            task,
            found["tokens"],
            {},
            seconds=(times["prompt_ms"] + times["predicted_ms"]) / 1e3,
            rounds=task.new_tokens - accepted,
            drafted=drafted,
            accepted=accepted,
        )

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        """All texts, `streams` at once. A text comes in one piece; the server says how long ago its first token was."""
        began = time.perf_counter()

        def serve(task: Task) -> Served:
            due = time.perf_counter() - began
            found = self.complete(task)
            end = time.perf_counter() - began
            first = max(due, end - found["timings"]["predicted_ms"] / 1e3)
            count = len(found["tokens"])
            return Served(due, ((first, 1), (end, count - 1)) if count > 1 else ((end, count),))

        with ThreadPoolExecutor(streams) as threads:
            return checked("llama.cpp", tasks, list(threads.map(serve, tasks))), {}

    def settings(self) -> Json:
        return self.how
