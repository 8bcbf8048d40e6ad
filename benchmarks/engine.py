"""What the verifier's engine itself costs: the share of its time that is neither forward nor verify.

A share means something only while the engine always has work, so verifiers are asked directly. `Decode`: each of some
streams lets the target write alone. `proposals`: each stream proposes what the target is known to write after its
prompt at temperature 0, several rounds ahead of their verdicts, while one more stream decodes in the same passes. The
verdicts of a stream that decodes tell, by the verifier's own clock, how long forward and verify of each pass took, and
how long the stream had been owed its token when the pass began: all that the engine did in between.

    python -m benchmarks.engine            the demo pair and a deepened target, about a minute and a half
    python -m benchmarks.engine --quick    does it work at all
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import grpc

from benchmarks import harness, plots
from benchmarks.contenders import tokenised
from benchmarks.harness import Bench, Json, tell
from benchmarks.services import VerifyStream, await_, models_of, verifier
from protos.outrider.v1 import sampling_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

LEAST_PASSES = 3
"""With all sequences in them, for a share to count."""
_AHEAD = 4  # rounds without a verdict
DECODED = 60  # in one go: a sequence 64 verdicts ahead of its reader is paused


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("engine", __doc__, quick="the demo pair, two streams")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--factor", type=int, default=12, help="how many times as deep the deepened target is")
    parser.add_argument("--streams", type=int, nargs="+", default=[8], help="at once")
    parser.add_argument("--gamma", type=int, default=4, help="tokens of a proposal")
    parser.add_argument("--repetitions", type=int, default=3)
    few = {"only": "demo", "streams": [2], "repetitions": 1}
    return harness.run("engine", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    for models in models_of(given.target, given.draft, given.only, given.factor):
        prompts = tokenised(models.target, bench.prompts)
        with verifier(models.target, max_sequences=max(given.streams) + 1) as address:
            for repetition in range(given.repetitions):
                for streams in given.streams:
                    some = [prompts[nth % len(prompts)] for nth in range(streams)]
                    for rounds, gamma in (("Decode", 0), ("proposals", given.gamma)):
                        keys = {"pair": models.name, "rounds": rounds, "streams": streams, "repetition": repetition}
                        if not bench.has(**keys):
                            bench.add({**keys, **await_(shared(address, some, gamma))})
                            tell(f"{', '.join(map(str, keys.values()))}: {bench.runs[-1]['share']:.1%} its own")


async def shared(address: str, prompts: Sequence[Sequence[int]], gamma: int) -> Json:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = VerifierServiceStub(channel)
        streams = [await _open(stub, prompt) for prompt in prompts]
        texts = await asyncio.gather(*(_decoded(stream) for stream in streams))
        for stream in streams:
            stream.cancel()
        if not gamma:
            return max(
                (figures([timings for _, timings in text], len(prompts)) for text in texts), key=lambda f: f["share"]
            )
        observer = await _open(stub, prompts[0])
        streams = [await _open(stub, prompt) for prompt in prompts]
        known = [[token for token, _ in text] for text in texts]
        playing = [asyncio.create_task(_play(stream, text, gamma)) for stream, text in zip(streams, known, strict=True)]
        passes = [timings for _, timings in await _decoded(observer)]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        for stream in (observer, *streams):
            stream.cancel()
        return figures(passes, len(prompts) + 1)


async def _open(stub: Any, prompt: Sequence[int]) -> VerifyStream:
    rule = sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
    return await VerifyStream.open(stub, prompt, DECODED, temperature=0.0, seed=1, rule=rule)


async def _decoded(stream: VerifyStream) -> list[tuple[int, Any]]:
    """Each token that the target writes alone, with the timings of its pass."""
    await stream.decode(DECODED)
    verdicts = [await stream.verdict() for _ in range(DECODED)]
    return [(verdict.token_ids[0], verdict.timings) for verdict in verdicts]


async def _play(stream: VerifyStream, text: Sequence[int], gamma: int) -> None:
    """Proposes the text, some rounds ahead of the verdicts, until a verdict differs: a near-tie fell otherwise."""
    outstanding: list[Sequence[int]] = []
    for base in range(0, len(text) - gamma, gamma + 1):
        await stream.propose(text[base : base + gamma])
        stream.commit(text[base : base + gamma + 1])
        outstanding.append(text[base : base + gamma + 1])
        if len(outstanding) == _AHEAD and list((await stream.verdict()).token_ids) != list(outstanding.pop(0)):
            return


def figures(passes: Sequence[Any], sequences: int) -> Json:
    """The engine's share, from the timings of the passes that held so many sequences.

    Raises:
        ValueError: there were fewer than `LEAST_PASSES` of them.
    """
    # The first says how long its Decode took to arrive at a pass.
    counted = [each for each in passes[1:] if each.pass_sequences == sequences]
    if len(counted) < LEAST_PASSES:
        raise ValueError(f"{len(counted)} passes held all {sequences} sequences; at least {LEAST_PASSES} must")
    outside, forward, verify = (
        mean(getattr(each, name) for each in counted) for name in ("queue_us", "forward_us", "verify_us")
    )
    share = outside / (outside + forward + verify)
    return {"passes": len(counted), "share": share, "outside_us": outside, "forward_us": forward, "verify_us": verify}


def summarise(bench: Bench) -> Json:
    """By pair, rounds and streams: the repetition of the median share, and the range of shares."""

    def leaf(runs: list[Json]) -> Json:
        shares = sorted(runs, key=lambda run: run["share"])
        middle = shares[len(shares) // 2]
        kept = {name: middle[name] for name in ("share", "outside_us", "forward_us", "verify_us", "passes")}
        return kept | {"share_range": [shares[0]["share"], shares[-1]["share"]]}

    return {"summary": harness.tree(bench.runs, ("pair", "rounds", "streams"), leaf)}


def table(document: Json) -> str:
    rows = [
        [*where, *(f"{found[f'{name}_us'] / 1e3:.2f} ms" for name in ("outside", "forward", "verify")),
         f"{found['share']:.1%}"]
        for where, found in harness.flat(document["summary"], 3)
    ]  # fmt: skip
    return harness.table(["pair", "rounds", "streams", "outside", "forward", "verify", "share"], rows)


def draw(document: Json, path: Path) -> None:
    leaves = list(harness.flat(document["summary"], 3))
    groups = [f"{pair}, {streams}\n{rounds}" for (pair, rounds, streams), _ in leaves]
    series = {"the engine's own share": [(found["share"], *found["share_range"]) for _, found in leaves]}
    with plots.picture(path, 1, 1, size=(6.4, 3.6), note=plots.caption(document)) as panels:
        plots.bars(panels[0][0], groups, series, colours=dict.fromkeys(series, plots.BLUE))


if __name__ == "__main__":
    sys.exit(main())
