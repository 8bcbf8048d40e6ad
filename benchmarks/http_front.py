"""The cost of the HTTP front: time per token with many streams over our gRPC client's, and its processor time.

All ways write the same texts in turns, with the same seeds and the γ of the draft service, all at once. The front is a
process of its own on the processors of the services. Its chunks are the events with text that it sends. Texts of two
lengths tell the time of a chunk from that of a text, for its begin and its end.

At the largest number of streams there are two floors as well, in a process like the front's (`http_floor`): reading the
draft service's messages by grpc.aio alone, and writing events of that size by uvicorn besides.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import harness, plots
from benchmarks.contenders import Task, texts, tokenised
from benchmarks.harness import Bench, Json, number, progress
from benchmarks.services import Services, http_server, models_of
from outrider.client import AsyncClient
from outrider.evaluation.pictures import BLUE, GREY, ORANGE, bars, level, picture
from outrider.evaluation.streams import for_each, serve
from outrider.rpc.errors import counted
from tests.cluster import free_address

GRPC, HTTP, BOTH, READ = "gRPC client", "HTTP front", "floor: read and write", "floor: read"
Found = tuple[list[float], int]
"""Seconds per token of each text, and the number of chunks."""

AIM, AIM_US = 0.05, 100
"""The largest share that the front should add to the time per token, and its processor time a chunk."""

FLOOR = "benchmarks.http_floor"

LENGTHS = (1, 2)
"""Of texts, in `--new-tokens`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("http_front", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    # Processor times of single texts differ much.
    harness.text_options(parser, prompts=8, new_tokens=32, repetitions=6)
    parser.set_defaults(streams=[1, 32])
    few = {"only": "demo", "prompts": 2, "new_tokens": 8, "repetitions": 1, "streams": [2]}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "streams"), figures)
    return harness.run("http_front", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        tasks = {
            length: [task for _, task in texts(prompts, length, 1) if task.temperature > 0]
            for length in (given.new_tokens * each for each in LENGTHS)
        }
        with ExitStack() as running:
            services = Services(models.target, models.draft, max_sequences=max(given.streams))
            draft = running.enter_context(services).draft.address
            front = server(running, "outrider.cli", "gateway", "--draft", draft, "--http")
            floor = server(running, FLOOR, draft)
            servers = {HTTP: front, BOTH: floor, READ: (f"{floor[0]}/read", floor[1])}
            for streams in given.streams:
                compare(bench, models.name, streams, tasks, draft, servers)
                progress(f"{models.name}, {streams} streams")


def compare(
    bench: Bench,
    pair: str,
    streams: int,
    tasks: Mapping[int, Sequence[Task]],
    draft: str,
    servers: Mapping[str, tuple[str, int]],
) -> None:
    """All ways with so many streams. `tasks` are those of each length, `servers` have a URL and a process each."""
    measured = servers if streams == max(bench.given.streams) else {HTTP: servers[HTTP]}
    ways: dict[tuple[str, int], Callable[[], Coroutine[Any, Any, Found]]] = {}
    for length, known in tasks.items():
        own = [known[nth % len(known)] for nth in range(max(streams, len(known)))]
        if length == bench.given.new_tokens:
            ways[GRPC, length] = partial(over_grpc, draft, own, streams)
        ways |= {(arm, length): partial(over_http, url, own, streams) for arm, (url, _) in measured.items()}
    for (_, length), way in ways.items():  # not measured
        if length == bench.given.new_tokens:
            asyncio.run(way())
    for repetition in range(bench.given.repetitions):
        for arm, length in harness.shuffled(ways, repetition):
            where = {"pair": pair, "streams": streams, "repetition": repetition, "arm": arm, "tokens": length}
            if bench.has(**where):
                continue
            pid = measured[arm][1] if arm in measured else None
            before = processor_seconds(pid)
            per_token, chunks = asyncio.run(ways[arm, length]())
            spent = processor_seconds(pid) - before
            found = {"per_token": median(per_token), "texts": len(per_token), "chunks": chunks, "seconds": spent}
            bench.add({**where, **found})


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

    async def write(task: Task) -> tuple[float, int]:
        body = {
            "prompt": list(task.token_ids), "max_tokens": task.new_tokens, "temperature": task.temperature,
            "seed": task.seed, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        began, chunks = time.perf_counter(), 0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    chunks, end = chunks + 1, time.perf_counter()
        return (end - began) / task.new_tokens, chunks

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=streams)) as client:
        written = await for_each(tasks, write, streams)
    return [seconds for seconds, _ in written], sum(chunks for _, chunks in written)


def server(running: ExitStack, module: str, *arguments: str) -> tuple[str, int]:
    """Starts a server, whose address is its last argument; returns its URL and the id of its process."""
    address = free_address()
    command = [sys.executable, "-m", module, *arguments, address]
    return f"http://{address}", running.enter_context(http_server(command, f"http://{address}")).pid


def processor_seconds(pid: int | None) -> float:
    """Processor time of all threads of a process so far, by its clock (`clock_getcpuclockid`); 0 without a process."""
    return 0.0 if pid is None else time.clock_gettime(~pid << 3 | 2)


def figures(runs: Sequence[Json]) -> Json:
    """All ways. `added` is the share that the way adds to the time per token over gRPC, the median over repetitions.

    `us_per_chunk` is the processor time that a chunk more costs, by the difference between texts of both lengths;
    `ms_per_text` is the rest of the time of a text. `us_per_chunk_in_all` has both in it, of the shorter texts.
    `own_us_per_chunk` of the front is what its chunk costs beyond that of the floor that reads and writes.
    """
    short = min(run["tokens"] for run in runs)
    by_arm = harness.grouped([run for run in runs if run["tokens"] == short], "arm")
    long = harness.grouped([run for run in runs if run["tokens"] > short], "arm")
    base = {run["repetition"]: run["per_token"] for run in by_arm[GRPC]}
    found = {}
    for arm in (each for each in (GRPC, HTTP, BOTH, READ) if each in by_arm):
        own = by_arm[arm]
        added = [run["per_token"] / base[run["repetition"]] - 1 for run in own]
        found[arm] = {
            "ms_per_token": 1e3 * median(run["per_token"] for run in own),
            **harness.with_range("added", added),
            **(costs(own, long[arm]) if arm in long else {}),
        }
    if BOTH in found:
        found[HTTP]["own_us_per_chunk"] = found[HTTP]["us_per_chunk"] - found[BOTH]["us_per_chunk"]
    return found


def costs(short: Sequence[Json], long: Sequence[Json]) -> Json:
    """Processor time by chunk and by text, from texts of two lengths."""
    total = harness.total
    chunks, seconds = total(short, "chunks"), total(short, "seconds")
    more = total(long, "chunks") - chunks
    per_chunk = (total(long, "seconds") - seconds) / more
    return {
        "chunks": int(2 * chunks + more),
        "us_per_chunk": 1e6 * per_chunk,
        "ms_per_text": 1e3 * (seconds - chunks * per_chunk) / total(short, "texts"),
        "us_per_chunk_in_all": 1e6 * seconds / chunks,
    }


def table(document: Json) -> str:
    columns: harness.Columns = {
        "ms per token": lambda arm: number(arm["ms_per_token"], 2),
        "added": lambda arm: harness.between(arm, "added", "+.1%"),
        "µs a chunk": lambda arm: number(arm.get("us_per_chunk"), 0),
        "its own": lambda arm: number(arm.get("own_us_per_chunk"), 0),
        "ms a text": lambda arm: number(arm.get("ms_per_text"), 1),
        "µs a chunk, in all": lambda arm: number(arm.get("us_per_chunk_in_all"), 0),
    }
    lines = [
        f"- ABOVE the aims of {AIM:.0%} and {AIM_US} µs: {pair} pair, {counted(int(streams), 'stream')}"
        for (pair, streams), arms in harness.flat(document["summary"], 2)
        if pair == "deepened" and BOTH in arms and (arms[HTTP]["added"] > AIM or arms[HTTP]["us_per_chunk"] > AIM_US)
    ]
    return "\n".join([*lines, "", harness.summary_table(document["summary"], ["pair", "streams", ""], columns)])


def draw(document: Json, path: Path) -> None:
    """Time per token over that of the gRPC client, and processor time of a chunk; the aims are dashed."""
    rows = [(f"{pair}\n{streams} at once", arms) for (pair, streams), arms in harness.flat(document["summary"], 2)]
    with picture(path, 1, 2, size=(4.8, 3.6), note=plots.caption(document)) as ((times, costs),):
        added = [(1 + arms[HTTP]["added"], *(1 + each for each in arms[HTTP]["added_range"])) for _, arms in rows]
        bars(times, [name for name, _ in rows], {HTTP: added}, colours={HTTP: ORANGE}, text="{:.2f}")
        measured = [(name, arms) for name, arms in rows if BOTH in arms]
        series = {arm: [(arms[arm]["us_per_chunk"],) * 3 for _, arms in measured] for arm in (HTTP, BOTH, READ)}
        colours = {HTTP: ORANGE, BOTH: BLUE, READ: GREY}
        bars(costs, [name for name, _ in measured], series, colours=colours, text="{:.0f}")
        costs.legend(fontsize=8, frameon=False)
        level(times)
        for panel, aim in ((times, 1 + AIM), (costs, AIM_US)):
            level(panel, aim, linestyle="--")
        times.set_ylabel("time per token, to the gRPC client's")
        costs.set_ylabel("processor time of a chunk, µs")


if __name__ == "__main__":
    sys.exit(main())
