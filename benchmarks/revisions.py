"""Two source trees, this one and an older one: tokens/s of the pair and of the target alone, in turns.

The older tree is a checkout of its own (`git worktree add DIR REVISION`). Each tree has its own services, and the
client is this tree's. All arms write after the same prompts with the same seeds. The ratio is the geometric mean over
repetitions, with its 95 % interval.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import harness
from benchmarks.contenders import outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import ROOT, Bench, Json, arms_table, compared, revision
from benchmarks.services import Services, models_of
from outrider.evaluation.intervals import student_quantile

OLD, NEW = "old", "new"
DECODE = "Decode"
ARMS = {f"{tree}, {name}": (tree, name) for name in (DECODE, "pair") for tree in (OLD, NEW)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("revisions", __doc__, quick="the demo pair, few texts")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=5, new_tokens=64, repetitions=10)
    parser.add_argument("--old", required=True, help="folder of the older source tree")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all services")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="of all texts; 1: none")
    few = {"only": "demo", "prompts": 2, "new_tokens": 16, "repetitions": 2}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "temperature"), figures)
    return harness.run("revisions", given, measure, summarise, table)


def measure(bench: Bench) -> None:
    given = bench.given
    trees = {OLD: Path(given.old).resolve(), NEW: ROOT}
    bench.document["revisions"] = {name: revision(tree) for name, tree in trees.items()}
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        with ExitStack() as running:
            # An older tree may lack the draft's flag for the prefix cache.
            services = {
                name: running.enter_context(
                    Services(models.target, models.draft, dtype=given.dtype, tree=tree, draft_flags=())
                )
                for name, tree in trees.items()
            }
            how: dict[str, Json] = {DECODE: {"gamma": 0}, "pair": {"speculation": "adaptive"}}
            penalty = {"repetition_penalty": given.repetition_penalty}
            writers = {arm: outrider_writer(services[tree], **how[way], **penalty) for arm, (tree, way) in ARMS.items()}
            warm_up(writers, [task for _, task in texts(prompts, given.new_tokens, 1)])  # γ is adapted
            take_turns(bench, {"pair": models.name}, texts(prompts, given.new_tokens, given.repetitions), writers)


def figures(runs: Sequence[Json]) -> Json:
    """Ratios of the new arms are to the old arm of the same kind: geometric means, with `interval` at 95 %."""
    by_arm = harness.grouped(runs, "arm")
    found: Json = {}
    for way in dict.fromkeys(way for _, way in ARMS.values()):
        names = [arm for arm, (_, own) in ARMS.items() if own == way]
        arms = compared(runs, names[0], names)
        old, new = (harness.rates(by_arm[name]) for name in names)
        found |= arms
        found[names[1]] |= _mean([math.log(new[nth] / old[nth]) for nth in new])
    return found


def _mean(logarithms: Sequence[float]) -> Json:
    mean, count = fmean(logarithms), len(logarithms)
    if count < 2:
        return {"ratio": math.exp(mean), "interval": None}
    margin = student_quantile(count - 1) * stdev(logarithms) / math.sqrt(count)
    return {"ratio": math.exp(mean), "interval": [math.exp(mean - margin), math.exp(mean + margin)]}


def table(document: Json) -> str:
    def interval(arm: Json) -> str:
        found = arm.get("interval")
        return "–" if found is None else f"{found[0]:.3f} to {found[1]:.3f}"

    trees = "".join(f"- {name}: {revision}\n" for name, revision in document["revisions"].items())
    return trees + arms_table(document["summary"], ("pair", "T"), **{"95 %": interval})


if __name__ == "__main__":
    sys.exit(main())
