"""What the HTTP front adds to our gRPC client: time per token with many streams, and its processor time a chunk.

Both ways write the same texts in turns, with the same seeds and the γ of the draft service, all at once. The front is a
process of its own on the processors of the services. Its chunks are the events with text that it sends.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import harness, plots
from benchmarks.contenders import Task, texts, tokenised
from benchmarks.harness import Bench, Json, number, progress
from benchmarks.services import NO_PREFIXES, Services, models_of
from outrider.client import AsyncClient
from outrider.evaluation.pictures import BLUE, ORANGE, picture
from outrider.evaluation.streams import serve
from tests.cluster import free_address

GRPC, HTTP = "gRPC client", "HTTP front"
Found = tuple[list[float], int]
"""Seconds per token of each text, and the number of chunks."""

AIM, AIM_US = 0.05, 100
"""The largest share that the front should add to the time per token, and its processor time a chunk."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("http_front", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=8, new_tokens=32)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    few = {"only": "demo", "prompts": 2, "new_tokens": 8, "repetitions": 1, "streams": [2]}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "streams"), figures)
    return harness.run("http_front", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    pairs = models_of(given)
    bench.document["models"] = {models.name: models.document() for models in pairs}
    for models in pairs:
        prompts = tokenised(models.target, harness.spread(bench.prompts, given.prompts))
        tasks = [task for _, task in texts(prompts, given.new_tokens, 1) if task.temperature > 0]
        flags = {"verifier_flags": NO_PREFIXES, "max_sequences": max(given.streams)}
        with Services(models.target, models.draft, **flags) as services, front(services.draft.address) as (url, pid):
            for streams in given.streams:
                own = [tasks[nth % len(tasks)] for nth in range(max(streams, len(tasks)))]
                ways: dict[str, Callable[[], Coroutine[Any, Any, Found]]] = {
                    GRPC: partial(over_grpc, services.draft.address, own, streams),
                    HTTP: partial(over_http, url, own, streams),
                }
                for way in ways.values():  # not measured
                    asyncio.run(way())
                for repetition in range(given.repetitions):
                    for arm in harness.rotated(ways, repetition):
                        where = {"pair": models.name, "streams": streams, "repetition": repetition, "arm": arm}
                        if bench.has(**where):
                            continue
                        before = processor_seconds(pid)
                        per_token, chunks = asyncio.run(ways[arm]())
                        spent = processor_seconds(pid) - before
                        bench.add({**where, "per_token": median(per_token), "chunks": chunks, "front_seconds": spent})
                progress(f"{models.name}, {streams} streams")


async def over_grpc(address: str, tasks: Sequence[Task], streams: int) -> Found:
    """Write the texts, so many at once."""
    requests = [(list(task.token_ids), options(task)) for task in tasks]
    async with AsyncClient(address) as client:
        served = await serve(client, requests, streams)
    return [(each.end - each.due) / each.tokens for each in served], sum(len(each.stamps) for each in served)


def options(task: Task) -> Json:
    return {
        "temperature": task.temperature, "seed": task.seed, "ignore_eos": True, "max_new_tokens": task.new_tokens,
    }  # fmt: skip


async def over_http(url: str, tasks: Sequence[Task], streams: int) -> Found:
    """As `over_grpc`."""
    waiting, seconds, chunks = list(reversed(tasks)), list[float](), 0

    async def stream(client: httpx.AsyncClient) -> None:
        nonlocal chunks
        while waiting:
            task, began = waiting.pop(), time.perf_counter()
            body = {
                "prompt": list(task.token_ids), "max_tokens": task.new_tokens, "temperature": task.temperature,
                "seed": task.seed, "ignore_eos": True, "stream": True,
            }  # fmt: skip
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                        chunks, end = chunks + 1, time.perf_counter()
            seconds.append((end - began) / task.new_tokens)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=streams)) as client:
        await asyncio.gather(*(stream(client) for _ in range(streams)))
    return seconds, chunks


@contextmanager
def front(draft: str) -> Iterator[tuple[str, int]]:
    """A front of a draft service; yields its URL and the id of its process."""
    address = free_address()
    command = [sys.executable, "-m", "outrider.cli", "gateway", "--draft", draft, "--http", address]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                try:
                    httpx.get(f"http://{address}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield f"http://{address}", process.pid
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(runs: Sequence[Json]) -> Json:
    """Both ways: medians over repetitions. `added` is the share that the way adds to the time per token over gRPC."""
    by_arm = {arm: harness.grouped(own, "repetition") for arm, own in harness.grouped(runs, "arm").items()}
    found = {}
    for arm in (GRPC, HTTP):
        times = {repetition: own[0]["per_token"] for repetition, own in by_arm[arm].items()}
        added = [times[each] / by_arm[GRPC][each][0]["per_token"] - 1 for each in times]
        chunks = sum(own[0]["chunks"] for own in by_arm[arm].values())
        spent = sum(own[0]["front_seconds"] for own in by_arm[arm].values())
        found[arm] = {
            "ms_per_token": 1e3 * median(times.values()),
            "added": median(added),
            "added_range": [min(added), max(added)],
            "chunks": chunks,
            "front_us_per_chunk": 1e6 * spent / chunks if arm == HTTP else None,
        }
    return found


def table(document: Json) -> str:
    columns: harness.Columns = {
        "ms per token": lambda arm: number(arm["ms_per_token"], 2),
        "added": lambda arm: f"{arm['added']:+.1%} ({arm['added_range'][0]:+.1%} to {arm['added_range'][1]:+.1%})",
        "chunks": lambda arm: str(arm["chunks"]),
        "processor µs a chunk": lambda arm: (
            "–" if arm["front_us_per_chunk"] is None else number(arm["front_us_per_chunk"], 0)
        ),
    }
    lines = [
        f"- ABOVE the aims of {AIM:.0%} and {AIM_US} µs: {pair} pair, {streams} streams"
        for (pair, streams), arms in harness.flat(document["summary"], 2)
        if pair == "deepened" and (arms[HTTP]["added"] > AIM or arms[HTTP]["front_us_per_chunk"] > AIM_US)
    ]
    return "\n".join([*lines, "", harness.summary_table(document["summary"], ["pair", "streams", ""], columns)])


def draw(document: Json, path: Path) -> None:
    rows = list(harness.flat(document["summary"], 2))
    with picture(path, 1, 1, size=(6.0, 0.6 + 0.6 * len(rows)), note=plots.caption(document)) as panels:
        panel: Any = panels.flat[0]
        for at, (_, arms) in enumerate(rows):
            base = arms[GRPC]["ms_per_token"]
            for offset, (arm, colour) in enumerate(((GRPC, BLUE), (HTTP, ORANGE))):
                value = arms[arm]["ms_per_token"] / base
                panel.barh(at + 0.35 * offset, value, height=0.3, color=colour, label=arm if at == 0 else None)
                panel.annotate(
                    f" {arms[arm]['ms_per_token']:.2f} ms", (value, at + 0.35 * offset), va="center", fontsize=8
                )
        panel.set_yticks(
            [at + 0.17 for at in range(len(rows))], [f"{pair}, {streams} streams" for (pair, streams), _ in rows]
        )
        panel.invert_yaxis()
        panel.set_xlabel("time per token, relative to the gRPC client", fontsize=8)
        panel.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
