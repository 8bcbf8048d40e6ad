"""Rejection sampling [L A.2] and lenience [L A.5] beside speculative sampling, on the demo pair.

Acceptance and distances are computed from the distributions, at every position of texts that the target wrote at
temperature 1; speeds are of both services, all leniences in turns.

Rejection sampling accepts x from q with p(x) / (M q(x)), M = max p/q: in all with 1/M, which is at most Σ min(p, q). It
gets the whole q: of a truncated one M is infinite. With lenience l the services accept with min(1, p / (l q̂)), and
sample from max(0, p - q̂) otherwise. At temperature 0 they accept x if p(x) ≥ l · max p.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness, plots
from benchmarks.contenders import outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import Bench, Json, compared, number
from benchmarks.services import Services, models_of
from benchmarks.sigmoid import Texts, drawn_from, texts_of, total_variation
from kernels.sampling import SamplingParams, probabilities
from models.measure import load
from outrider.evaluation import pictures

SAMPLING = {
    "T = 1": SamplingParams(),
    "T = 0.7": SamplingParams(temperature=0.7),
    "T = 1, top-k 40": SamplingParams(top_k=40),
}
LENIENCES = (1.0, 0.5, 0.3, 0.1)
ALONE = "Decode"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("acceptance", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=4, new_tokens=64)
    # Distributions are taken of `texts`, each of `tokens` after the beginning of a prompt.
    parser.set_defaults(texts=64, prompt_tokens=16, tokens=48, gamma=5)
    few = {
        "only": "demo", "prompts": 1, "new_tokens": 16, "repetitions": 1, "texts": 2, "prompt_tokens": 2, "tokens": 16,
    }  # fmt: skip
    given = harness.parse(parser, arguments, few)
    arms = [ALONE, *map(_arm, LENIENCES)]
    figures = partial(compared, reference=ALONE, names=arms)
    return harness.run("acceptance", given, measure, harness.summary_of(("pair", "temperature"), figures), table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document |= bench.once("distributions", lambda: _distributions(bench))
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        with Services(models.target, models.draft) as services:
            writers = {ALONE: outrider_writer(services, gamma=0)} | {
                _arm(each): outrider_writer(services, gamma=given.gamma, rule="tokenwise", lenience=each)
                for each in LENIENCES
            }
            written = list(texts(prompts, given.new_tokens, given.repetitions))
            warm_up(writers, [written[0][1]])
            take_turns(bench, {"pair": models.name}, written, writers)


def _arm(lenience: float) -> str:
    return f"l = {lenience:g}"


# ------------------------------------------------------------------------------------------------------- distributions


def _distributions(bench: Bench) -> Json:
    given = bench.given
    found = texts_of(bench, load(given.target), load(given.draft), given.prompt_tokens)
    return {"places": int(found.alive.sum()), "rejection": rejections(found), "lenience": leniences(found)}


def rejections(found: Texts) -> Json:
    """By sampling: the means of both acceptances, and for the picture those of some places."""
    z, v = found.places
    by_sampling: Json = {}
    for name, params in SAMPLING.items():
        p, q = (probabilities(each, params).double() for each in (z, v))
        speculative, rejection = torch.minimum(p, q).sum(-1), 1 / greatest_ratio(p, q)
        assert bool((rejection <= speculative + 1e-9).all()), "the bound of [L A.2]"
        some = torch.arange(0, len(p), max(1, len(p) // 400))
        by_sampling[name] = {
            "speculative": float(speculative.mean()),
            "rejection": float(rejection.mean()),
            "places": torch.stack([speculative[some], rejection[some]], dim=1).tolist(),
        }
    return by_sampling


def greatest_ratio(p: Tensor, q: Tensor) -> Tensor:
    """M = max p/q of each row of `[N, V]`; infinite if q lacks a token of p."""
    return torch.where(p > 0, p / q, 0.0).amax(-1)


def leniences(found: Texts) -> Json:
    """By temperature and lenience: α, and the total variation of a token's distribution from the target's."""
    z, v = found.places
    p, q = probabilities(z, SAMPLING["T = 1"]).double(), drawn_from(v)
    by_temperature: Json = {"1": {}, "0": {}}
    for lenience in LENIENCES:
        each = {"alpha": torch.minimum(p / lenience, q).sum(-1), "tv": total_variation(lenient(p, q, lenience), p)}
        by_temperature["1"][f"{lenience:g}"] = {name: float(values.mean()) for name, values in each.items()}
        by_temperature["0"][f"{lenience:g}"] = lenient_greedily(z, v, lenience)
    return by_temperature


def lenient(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """The distribution of a token, `[N, V]`, that is drafted from `q` and verified with this lenience."""
    accepted = torch.minimum(p / lenience, q)
    rest = (p - q).clamp(min=0)
    return accepted + (1 - accepted.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)


def lenient_greedily(z: Tensor, v: Tensor, lenience: float) -> Mapping[str, float]:
    """At temperature 0: the share of places where the draft's token is accepted, and where it replaces the target's."""
    drafted, best = v.argmax(-1), z.argmax(-1)
    near = z.gather(1, drafted[:, None]) - z.amax(-1, keepdim=True) >= torch.tensor(lenience).log()
    accepted = (drafted == best) if lenience == 1 else near[:, 0]
    return {"alpha": float(accepted.double().mean()), "tv": float((accepted & (drafted != best)).double().mean())}


# ------------------------------------------------------------------------------------------------------------- reports


def table(document: Json) -> str:
    rejection = [
        [name, number(each["speculative"], 3), number(each["rejection"], 3)]
        for name, each in document["rejection"].items()
    ]
    rows = [
        [temperature, lenience, number(each["alpha"], 3), number(each["tv"], 3)]
        + [harness.between(arms[temperature][_arm(float(lenience))]) for arms in document["summary"].values()]
        for temperature, found in document["lenience"].items()
        for lenience, each in found.items()
    ]
    return "\n\n".join(
        [
            harness.table(["sampling", "Σ min(p, q)", "rejection sampling, 1/M"], rejection),
            harness.table(["T", "l", "α", "total variation", *document["summary"]], rows),
        ]
    )


def draw(document: Json, path: Path) -> None:
    note = f"{plots.caption(document)}. {document['places']:,} places of text of the target."
    with pictures.picture(path, 1, 3, size=(4.4, 3.6), note=note) as ((left, sampled, greedy),):
        for (name, each), colour in zip(document["rejection"].items(), pictures.COLOURS, strict=False):
            pictures.line(left, each["places"], linestyle="none", marker=".", alpha=0.5, color=colour, label=name)
        pictures.line(
            left, [(x / 100, x / 100) for x in range(1, 101)], color="black", linewidth=1, label="bound [L A.2]"
        )
        left.set(title="a point a place", xlabel="Σ min(p, q)", ylabel="accepted by rejection sampling, 1/M")
        left.set(yscale="log", ylim=(1e-5, 2), xlim=(0, 1.02))
        for panel, temperature in ((sampled, "1"), (greedy, "0")):
            for (pair, arms), colour in zip(document["summary"].items(), pictures.COLOURS, strict=False):
                found = document["lenience"][temperature]
                points = [
                    (each["tv"], arms[temperature][_arm(float(lenience))]["ratio"]) for lenience, each in found.items()
                ]
                pictures.line(panel, points, marker="o", color=colour, label=f"{pair} pair")
            pictures.level(panel)
            panel.set(title=f"lenience 1 to 0.1, T = {temperature}", xlabel="total variation of a token")
            panel.set_ylabel("tokens/s, to the target alone")
            panel.legend(fontsize=8, frameon=False, loc="lower right")


if __name__ == "__main__":
    sys.exit(main())
