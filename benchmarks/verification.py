"""Time and memory of a verification on a CPU, in the layout of [W Tables 3, 5 and 8, Figures 3 to 5].

Part `alone`: one call on synthetic logits with the vocabularies of the paper's models, by γ, B and rule; the contenders
are those of `benchmarks.kernel`, and so are the 16 proposals in turn at B = 1. Part `texts`: transformers' assisted
generation on the demo pair at temperature 1, as in the paper. Its `_speculative_sampling` is its own, or one of our
rules with the same whole q. The time of the verifications [W Table 8] and of the text [W Table 5] is measured. One
thread.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from transformers.generation import utils

from benchmarks import harness, kernel, plots
from benchmarks.contenders import (
    Task,
    Write,
    load_model,
    take_turns,
    texts,
    tokenised,
    transformers_writer,
    warm_up,
)
from benchmarks.harness import Bench, Json, number
from benchmarks.services import models_of
from benchmarks.timing import Timer
from kernels.sampling import SamplingParams
from kernels.sigmoid import SigmoidScales, draft_logits
from kernels.sparse import SparseDistribution
from kernels.verify import Proposed, Rule, verify
from outrider.evaluation import pictures

ALONE, TEXTS = PARTS = ("alone", "texts")
MODELS = {32_000: "Llama 2", 51_865: "Whisper", 151_936: "Qwen", 256_000: "Gemma"}
"""The models of [W] with a vocabulary."""
PLAN = kernel.Plan(tuple(MODELS), gammas=(1, 3, 5, 10, 15, 20), batches=(4, 16), repeats=32, rules=kernel.RULES)
QUICK = kernel.Plan((512,), gammas=(1, 2), batches=(2,), gamma=2, repeats=5, rules=kernel.RULES)
BASELINE = "transformers"
ARMS = (BASELINE, "torch", *kernel.RULES)
SCALES = SigmoidScales(-1e3, 1e3)
PLAIN = SamplingParams()

Sample = Callable[..., tuple[Tensor, Tensor]]
"""With the arguments and the results of transformers' `_speculative_sampling`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("verification", __doc__, quick="small sizes, one text")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=3, new_tokens=64)
    parser.set_defaults(gammas=[3, 5, 10, 15])  # of the texts
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    few = {"only": "demo", "prompts": 1, "new_tokens": 16, "repetitions": 1, "gammas": [3]}
    return harness.run("verification", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    torch.set_num_threads(1)
    if ALONE in given.parts:
        plan = QUICK if given.quick else PLAN
        timer = Timer(torch.device("cpu"), plan.repeats)
        bench.document["copy_bytes_per_second"] = bench.once("copy", timer.copy_bandwidth)
        kernel.measure(plan, ("gamma", "batch"), timer, bench, seconds=float("inf"))
    for models in models_of(bench) if TEXTS in given.parts else ():
        target, draft = load_model(models.target), load_model(models.draft)
        prompts = tokenised(models.target, bench.some_prompts)
        written = list(texts(prompts, given.new_tokens, given.repetitions, temperatures=(1.0,)))
        for gamma in given.gammas:
            write = transformers_writer(target, threads=1, draft=draft, tokens=gamma)
            writers = {arm: verified_by(sample, write) for arm, sample in SAMPLES.items()}
            warm_up(writers, [written[0][1]])
            take_turns(bench, {"pair": models.name, "gamma": gamma}, written, writers)


def ours(rule: Rule) -> Sample:
    """`kernels.verify` in the place of `_speculative_sampling`."""

    def sample(ids: Tensor, q_logits: Tensor, gamma: int, logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        # ids: [1, L + γ], q_logits: [1, γ, V], logits: [1, γ+1, V]
        tokens = tuple(ids[0, -gamma:].tolist())
        is_sigmoid = rule is Rule.SIGMOID
        q = draft_logits(q_logits[0], PLAIN) if is_sigmoid else _whole(q_logits[0].softmax(-1))
        base_length, scales = ids.shape[1] - gamma, SCALES if is_sigmoid else None
        proposal = Proposed(tokens, tuple(q), PLAIN, torch.initial_seed(), base_length, rule, sigmoid=scales)
        (result,) = verify(logits[0], [proposal])
        return torch.tensor([[*tokens[: result.accepted], result.next_token]]), torch.tensor(result.accepted)

    return sample


def _whole(q: Tensor) -> list[SparseDistribution]:
    """Each row of `q`, `[γ, V]`, with all its tokens, to 16 bits of the largest; none is left out."""
    weights = (q * (65535 / q.amax(-1, keepdim=True))).round_().clamp_(min=1).numpy().astype(np.uint16)
    ids = np.arange(q.shape[-1])
    return [SparseDistribution(ids, row, int(row.sum(dtype=np.int64))) for row in weights]


SAMPLES: dict[str, Sample] = {BASELINE: utils._speculative_sampling} | {
    rule.value: ours(rule) for rule in (Rule.TOKENWISE, Rule.BLOCK, Rule.SIGMOID)
}


def verified_by(sample: Sample, write: Write) -> Write:
    """`write` with another `_speculative_sampling`; the run has the microseconds of each call."""

    def verified(task: Task) -> Json:
        took: list[float] = []

        def timed(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            begin = time.perf_counter()
            found = sample(*given, **more)
            took.append(1e6 * (time.perf_counter() - begin))
            return found

        with _in_place(timed):
            return write(task) | {"verify_us": took}

    return verified


@contextmanager
def _in_place(sample: Sample) -> Iterator[None]:
    before = utils._speculative_sampling
    utils._speculative_sampling = sample
    try:
        yield
    finally:
        utils._speculative_sampling = before


# ------------------------------------------------------------------------------------------------------------- figures


def summarise(bench: Bench) -> Json:
    alone = [run | {"arm": _arm(run)} for run in bench.runs if "us" in run]
    alone.sort(key=lambda run: ARMS.index(run["arm"]))
    written = [run for run in bench.runs if "verify_us" in run]
    return {
        ALONE: harness.tree(alone, ("V", "B", "gamma", "arm"), lambda runs: _one_call(runs[0])),
        TEXTS: harness.tree(written, ("pair", "gamma"), _of_texts),
    }


def _arm(run: Json) -> str:
    return str(run["rule"] if run["contender"] == "outrider" else run["contender"])


def _one_call(run: Json) -> Json:
    return {
        "us": kernel.device_us(run),
        "peak_mib": None if run["peak_bytes"] is None else run["peak_bytes"] / 2**20,
        "gb_per_second": run["must_bytes"] / kernel.device_us(run, "cold") / 1e3,  # caches are cold
    }


def _of_texts(runs: Sequence[Json]) -> Json:
    by_arm = harness.grouped(runs, "arm")
    reference = harness.rates(by_arm[BASELINE])
    found = {}
    for arm in SAMPLES:
        own = by_arm[arm]
        speed = harness.ratio(harness.rates(own), reference)
        took = [us for run in own for us in run["verify_us"]]
        found[arm] = {
            "accepted": harness.total(own, "accepted") / harness.total(own, "drafted"),
            "verify_us": fmean(took),
            "verify_us_deviation": pstdev(took),
            "round_us": 1e6 * harness.total(own, "seconds") / harness.total(own, "rounds"),
            "text_saved": 1 - 1 / speed["ratio"],
            "text_saved_range": [1 - 1 / each for each in speed["ratio_range"]],
        }
    for each in found.values():  # of a round, if each had as many
        each["saved"] = (found[BASELINE]["verify_us"] - each["verify_us"]) / found[BASELINE]["round_us"]
    return found


def table(document: Json) -> str:
    calls: harness.Columns = {
        "µs": lambda found: number(found["us"], 0),
        "peak, MiB": lambda found: number(found["peak_mib"], 1),
        "GB/s": lambda found: number(found["gb_per_second"], 1),
    }
    written: harness.Columns = {
        "accepted": lambda found: f"{found['accepted']:.1%}",
        "verification, µs": lambda found: f"{found['verify_us']:.0f} ± {found['verify_us_deviation']:.0f}",
        "round, ms": lambda found: number(found["round_us"] / 1e3, 1),
        "of it saved by the verification": lambda found: f"{found['saved']:.1%}",
        "saved of a text": lambda found: harness.between(found, "text_saved", ".1%"),
    }
    return "\n\n".join(
        [
            harness.summary_table(document[ALONE], ["V", "B", "γ", ""], calls, "One call"),
            harness.summary_table(document[TEXTS], ["pair", "γ", ""], written, "Texts"),
        ]
    )


def draw(document: Json, path: Path) -> None:
    """A column a vocabulary, after [W Figures 3 to 5]: time by γ, peak memory by γ, time by B."""
    note = f"{plots.caption(document)}, one thread. Memory beside the logits."
    with pictures.picture(path, 3, max(1, len(document[ALONE])), size=(3.2, 2.7), note=note) as panels:
        for (V, by_batch), (times, memory, batches) in zip(document[ALONE].items(), panels.T, strict=False):
            by_gamma = by_batch["1"]
            _lines(times, by_gamma, "us", 1e-3)
            _lines(memory, by_gamma, "peak_mib")
            at = next(gamma for B, found in by_batch.items() if B != "1" for gamma in found)
            _lines(batches, {B: found[at] for B, found in by_batch.items() if at in found}, "us", 1e-3)
            times.set_title(" ".join([f"V = {int(V):,}", MODELS.get(int(V), "")]), fontsize=10)
            for panel, label in ((times, "γ (B = 1)"), (memory, "γ (B = 1)"), (batches, f"B (γ = {at})")):
                panel.set_xlabel(label, fontsize=8)
                panel.set_yscale("log")
        for panel, label in zip(panels[:, 0], ("ms", "peak memory, MiB", "ms"), strict=True):
            panel.set_ylabel(label, fontsize=8)


def _lines(panel: Axes, along: Json, key: str, scale: float = 1.0) -> None:
    for arm, colour in zip(ARMS, pictures.COLOURS, strict=False):
        points = [(int(x), found[arm][key] and found[arm][key] * scale) for x, found in along.items() if arm in found]
        style = "--" if arm in kernel.NAMES else "-"
        pictures.line(panel, points, marker="o", linestyle=style, color=colour, label=arm)


if __name__ == "__main__":
    sys.exit(main())
