"""The least that a round over gRPC can cost, for comparison: two processes that compute as the two services do.

    python -m benchmarks.network_floor target MODEL DTYPE          # prints its address
    python -m benchmarks.network_floor draft MODEL DTYPE ADDRESS   # a JSON object of results for each one on its input

Each computes on a thread beside its event loop, as an engine does, and sends bytes of the size of our messages on one
held stream. There is nothing else: no messages to encode or check, no cache to keep, no statistics, no text, no client.
"""

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from typing import Any

import grpc
import torch
import uvloop

from benchmarks.harness import Json
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, truncate
from kernels.verify import Proposed, Rule
from outrider.cli.processes import halves, keep_on, service_environment
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.lifecycle import SWITCH_INTERVAL
from verifier_service.target_runner import TargetRunner

_METHOD = "/network.Floor/Rounds"
_LENGTH, _MOST = 96, 256  # positions in the KV cache, and the most
_MESSAGE_BYTES, _TOKEN_BYTES, _REPLY_BYTES = 80, 10, 140  # of a proposal, of each token beside its q̂, of a verdict
_UNUSED = 10  # rounds at the start that are not measured


class _Computing:
    """Runs functions on a thread of its own, one after another, for a caller on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any], float]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def __call__(self, function: Callable[[], Any]) -> tuple[Any, float]:
        """The result, and the seconds from the request until there is one."""
        done = self._loop.create_future()
        self._inbox.put((function, done, time.perf_counter()))
        found: tuple[Any, float] = await done
        return found

    def _run(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while True:
                function, done, requested = self._inbox.get()
                result = function()
                self._loop.call_soon_threadsafe(done.set_result, (result, time.perf_counter() - requested))


def _model(folder: str, dtype: str) -> tuple[ModelRunner, int]:
    """A model, and a slot with `_LENGTH` positions."""
    runner = TorchRunner.build(load_model(ModelSource(folder, dtype=dtype)), 1, _MOST)
    slot = runner.pool.allocate()
    runner.forward([Chunk(slot, [1] * _LENGTH, 0, _LENGTH)])
    return runner, slot


async def _target(folder: str, dtype: str) -> None:
    runner, slot = _model(folder, dtype)
    target, size = TargetRunner(runner, vocab_size=runner.loaded.vocab_size), runner.loaded.vocab_size
    logits = runner.forward([Chunk(slot, [1] * 32, _LENGTH, 0)])
    q = [truncate(row, SparseConfig()) for row in torch.softmax(logits, -1).numpy()]
    computing = _Computing()

    def verify(gamma: int, temperature: float, length: int) -> None:
        runner.pool.rollback(slot, _LENGTH)
        drafted = tuple(int(each.ids[-1]) % size for each in q[:gamma])
        proposal = Proposed(
            tokens=drafted, q=tuple(q[:gamma]) if temperature else (None,) * gamma,
            params=SamplingParams(temperature=temperature), seed=1, base_length=length, rule=Rule.BLOCK,
        )  # fmt: skip
        target([Chunk(slot, [1, *drafted], _LENGTH, 0)], [proposal])

    async def rounds(_: Any, context: Any) -> None:
        length = _LENGTH
        while (request := await context.read()) is not grpc.aio.EOF:
            length += 1
            gamma, temperature = struct.unpack_from("<id", request)
            _, seconds = await computing(partial(verify, gamma, temperature, length))
            await context.write(struct.pack("<d", seconds) + bytes(_REPLY_BYTES))

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(rounds)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("network.Floor", {"Rounds": handler}),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


async def _draft(folder: str, dtype: str, address: str) -> None:
    runner, slot = _model(folder, dtype)
    drafting = DecodeLoop(runner, runner.loaded.vocab_size, SparseConfig())
    computing, loop = _Computing(), asyncio.get_running_loop()

    def draft(gamma: int, temperature: float, turn: int) -> int:
        """The bytes of the proposal."""
        runner.pool.rollback(slot, _LENGTH)
        draws = [Draw(SamplingParams(temperature=temperature), (0.37 * (turn + i)) % 1.0) for i in range(gamma)]
        samples = drafting.decode([Chunk(slot, [1, 2], _LENGTH, 1)], [draws])[0]
        return _MESSAGE_BYTES + sum(_TOKEN_BYTES + _bytes_of(each.q) for each in samples)

    async with grpc.aio.insecure_channel(address) as channel:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            given = json.loads(line)
            gamma, temperature = given["gamma"], given["temperature"]
            stream: Any = channel.stream_stream(_METHOD)()
            parts = []
            for turn in range(_UNUSED + given["rounds"]):
                began = time.perf_counter()
                size, drafted = await computing(partial(draft, gamma, temperature, turn))
                await stream.write(struct.pack("<id", gamma, temperature) + bytes(size))
                (verified,) = struct.unpack_from("<d", await stream.read())
                parts.append((drafted, verified, time.perf_counter() - began - drafted - verified))
            await stream.done_writing()
            means = map(mean, zip(*parts[_UNUSED:], strict=True))
            print(json.dumps(dict(zip(("draft", "target", "other"), means, strict=True))), flush=True)


def _bytes_of(q: SparseDistribution | None) -> int:
    return 0 if q is None else 6 * len(q.ids)


Rounds = Callable[..., Json]
"""Plays so many `rounds` with `gamma` and `temperature`; returns the mean seconds of `draft`, `target` and `other`."""


@contextmanager
def floor(target: Path, draft: Path, dtype: str) -> Iterator[Rounds]:
    """Both processes, each on half of the processors, as the services."""
    first, second = halves(1) or (None, None)
    with ExitStack() as running:
        verifying = _started(running, first, "target", target, dtype)
        drafting = _started(running, second, "draft", draft, dtype, str(_line_of(verifying)).strip())

        def rounds(**given: Any) -> Json:
            assert drafting.stdin is not None
            drafting.stdin.write(json.dumps(given) + "\n")
            drafting.stdin.flush()
            found: Json = json.loads(_line_of(drafting))
            return found

        yield rounds


def _started(running: ExitStack, cores: Collection[int] | None, *arguments: str | Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.network_floor", *map(str, arguments)],
        env={**os.environ, **service_environment(1)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    running.enter_context(process)
    running.callback(process.terminate)
    if cores:
        keep_on(process.pid, cores)
    return process


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise OSError(f"{process.args!r} ended with code {process.wait()}")
    return line


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL)
    side, *given = sys.argv[1:]
    uvloop.run(_target(*given) if side == "target" else _draft(*given))
