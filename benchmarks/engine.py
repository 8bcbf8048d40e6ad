"""The cost of the verifier's engine itself: the share of its time that is neither forward nor verify.

The share means something only while the engine always has work, so verifiers are called directly. `Decode`: in each
stream the target writes alone. `proposals`: each stream proposes the known text of the target at temperature 0, several
rounds ahead of the verdicts, while one more stream decodes in the same batches. Verdicts of a stream that decodes give,
by the verifier's clock, the time of forward and verify, and how long the stream waited before: all other work. The
share is of the sums over all such streams.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks import harness, plots
from benchmarks.contenders import tokenised
from benchmarks.harness import Bench, Json, progress
from benchmarks.services import VerifyStream, await_, models_of, verifier
from outrider.evaluation import pictures
from protos.outrider.v1 import sampling_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

LEAST_PASSES = 3
"""With three quarters of all sequences in them, for a share to count."""
_AHEAD = 4  # rounds without a verdict
DECODED = 60  # in one go: a sequence 64 verdicts ahead of its reader is paused


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("engine", __doc__, quick="the demo pair, two streams")
    harness.target_options(parser, factor=12)
    parser.set_defaults(streams=[8], gamma=4, repetitions=3)
    few = {"only": "demo", "streams": [2], "repetitions": 1}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "rounds", "streams"), median_run)
    return harness.run("engine", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.prompts)
        with verifier(models.target, max_sequences=max(given.streams) + 1) as address:
            for repetition in range(given.repetitions):
                for streams in given.streams:
                    some = [prompts[nth % len(prompts)] for nth in range(streams)]
                    for rounds, gamma in (("Decode", 0), ("proposals", given.gamma)):
                        keys = {"pair": models.name, "rounds": rounds, "streams": streams, "repetition": repetition}
                        if not bench.has(**keys):
                            bench.add({**keys, **await_(shared(address, some, gamma))})
                            progress(f"{', '.join(map(str, keys.values()))}: {bench.runs[-1]['share']:.1%} its own")


async def shared(address: str, prompts: Sequence[Sequence[int]], gamma: int) -> Json:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = VerifierServiceStub(channel)
        streams = [await _open(stub, prompt, joined=True) for prompt in prompts]
        texts = await asyncio.gather(*(_decoded(stream) for stream in streams))
        for stream in streams:
            stream.cancel()
        if not gamma:
            return figures(texts, len(prompts))
        observer = await _open(stub, prompts[0], joined=False)  # a verdict for each pass
        streams = [await _open(stub, prompt, joined=False) for prompt in prompts]
        known = [[token for verdict in text for token in verdict.token_ids] for text in texts]
        playing = [asyncio.create_task(_play(stream, text, gamma)) for stream, text in zip(streams, known, strict=True)]
        verdicts = await _decoded(observer)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        for stream in (observer, *streams):
            stream.cancel()
        return figures([verdicts], len(prompts) + 1)


async def _open(stub: Any, prompt: Sequence[int], *, joined: bool) -> VerifyStream:
    rule = sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
    return await VerifyStream.open(stub, prompt, DECODED, joined=joined, temperature=0.0, seed=1, rule=rule)


async def _decoded(stream: VerifyStream) -> list[Any]:
    """The verdicts of tokens that the target writes alone."""
    await stream.decode(DECODED)
    verdicts = list[Any]()
    while sum(len(verdict.token_ids) for verdict in verdicts) < DECODED:
        verdicts.append(await stream.verdict())
    return verdicts


async def _play(stream: VerifyStream, text: Sequence[int], gamma: int) -> None:
    """Proposes the text, some rounds ahead of the verdicts, until a verdict differs: a near-tie fell otherwise."""
    outstanding: list[Sequence[int]] = []
    for base in range(0, len(text) - gamma, gamma + 1):
        await stream.propose(text[base : base + gamma])
        stream.commit(text[base : base + gamma + 1])
        outstanding.append(text[base : base + gamma + 1])
        if len(outstanding) == _AHEAD and list((await stream.verdict()).token_ids) != list(outstanding.pop(0)):
            return


def figures(texts: Sequence[Sequence[Any]], sequences: int) -> Json:
    """The engine's share over the verdicts of all texts, from the passes with most sequences.

    Raises:
        ValueError: fewer than `LEAST_PASSES` of a text's passes, on average, had as many.
    """
    # The first verdict of a text waited for its Decode.
    verdicts = [verdict for text in texts for verdict in text[1:]]
    counted = [each for each in verdicts if 4 * each.timings.pass_sequences >= 3 * sequences]
    passes = sum(len(each.token_ids) for each in counted)
    if passes < LEAST_PASSES * len(texts):
        raise ValueError(
            f"{passes // len(texts)} passes held three quarters of the {sequences} sequences; "
            f"at least {LEAST_PASSES} must"
        )
    names = ("queue_us", "forward_us", "verify_us")
    outside, forward, verify = (sum(getattr(each.timings, name) for each in counted) / passes for name in names)
    share = outside / (outside + forward + verify)
    return {
        "passes": passes // len(texts),
        "share": share,
        "outside_us": outside,
        "forward_us": forward,
        "verify_us": verify,
    }


def median_run(runs: Sequence[Json]) -> Json:
    """The repetition of the median share, and the range of shares."""
    shares = sorted(runs, key=lambda run: run["share"])
    middle = shares[len(shares) // 2]
    kept = {name: middle[name] for name in ("share", "outside_us", "forward_us", "verify_us", "passes")}
    return kept | {"share_range": [shares[0]["share"], shares[-1]["share"]]}


def table(document: Json) -> str:
    def ms(name: str) -> Callable[[Json], str]:
        return lambda found: f"{found[f'{name}_us'] / 1e3:.2f} ms"

    columns = {name: ms(name) for name in ("outside", "forward", "verify")}
    columns["share"] = lambda found: f"{found['share']:.1%}"
    return harness.summary_table(document["summary"], ["pair", "rounds", "streams"], columns)


def draw(document: Json, path: Path) -> None:
    leaves = list(harness.flat(document["summary"], 3))
    groups = [f"{pair}, {streams}\n{rounds}" for (pair, rounds, streams), _ in leaves]
    series = {"the engine's own share": [(found["share"], *found["share_range"]) for _, found in leaves]}
    with pictures.picture(path, 1, 1, size=(6.4, 3.6), note=plots.caption(document)) as panels:
        pictures.bars(panels[0][0], groups, series, colours=dict.fromkeys(series, pictures.BLUE))


if __name__ == "__main__":
    sys.exit(main())
