"""α of each draft at each way to sample, in the layout of [L Tables 3 and 5], by `outrider.evaluation.alpha`.

The demo pair continues code, and the translation pair translates. Unigrams and bigrams count the training text of the
demo target, and sentences of the language that the translation target writes; none is in the prompts. `parallel` is the
demo's parallel draft with 4 tokens a pass. `ngram` and `lookup` are drafters of ours that the paper does not have. In
float32.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.harness import ROOT, Bench, Json, digest_of, progress
from models.corpus import training_text
from outrider.evaluation import ALPHA_DRAFTERS
from outrider.evaluation.alpha import Estimate, Options, run
from outrider.evaluation.pictures import COLOURS, Point, bars, line, picture

DEMO, TRANSLATION = "demo", "translation"
SAMPLING: dict[str, Json] = {
    "T = 0": {"temperature": 0.0},
    "T = 1": {"temperature": 1.0},
    "T = 1, top-k 40": {"temperature": 1.0, "top_k": 40},
}
LENIENCES = (1.0, 0.5, 0.3, 0.1)
PAPER = ("unigram", "bigram", "model", "parallel")
"""The drafters of [L Table 3], and the one that its section 3.6 asks for: first in tables and pictures."""
ORDER = (*PAPER, *(name for name in ALPHA_DRAFTERS if name not in PAPER))
PARALLEL_DRAFT = ROOT / "models" / "demo" / "parallel-draft"
TOKENS_PER_PASS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("alpha", __doc__, quick="few tokens, the demo pair only")
    parser.add_argument("--only", choices=(DEMO, TRANSLATION), help="one of the two pairs")
    # Tokens that the target writes, the training text that is counted, and sentences that are translated.
    parser.set_defaults(tokens=10_000, corpus_mb=4.0, sentences=300)
    given = harness.parse(parser, arguments, {"only": DEMO, "tokens": 200, "corpus_mb": 0.1})
    summarise = harness.summary_of(("pair", "sampling", "drafter", "lenience"), lambda runs: _figures(runs[0]))
    return harness.run("alpha", given, measure, summarise, tables, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document["models"] = {}
    for name in [given.only] if given.only else [DEMO, TRANSLATION]:
        folder = given.target.parent if name == DEMO else ROOT / "models" / "translation"
        target, draft = (given.target, given.draft) if name == DEMO else (folder / "target", folder / "draft")
        models = {"target": target, "draft": draft} | ({"parallel": PARALLEL_DRAFT} if name == DEMO else {})
        bench.document["models"][name] = {role: digest_of(each) for role, each in models.items()}
        with tempfile.TemporaryDirectory() as temporary:
            corpus = Path(temporary) / "corpus.txt"
            corpus.write_text(_corpus(name, given.corpus_mb), encoding="utf-8")
            for sampling, params in SAMPLING.items():
                if bench.has(pair=name, sampling=sampling):
                    continue
                options = Options(
                    str(target),
                    str(draft),
                    tuple(drafter for drafter in ORDER if drafter != "parallel"),
                    tuple(bench.prompts if name == DEMO else _sentences(given.sentences)),
                    tokens=given.tokens,
                    leniences=LENIENCES,
                    ngram_corpus=corpus,
                    ngram_by_line=name == TRANSLATION,
                    dtype="float32",
                    device="cpu",
                    **params,
                )
                found = run(options)
                estimates = list(found.estimates)
                if name == DEMO:  # of the same texts
                    parallel = replace(options, draft=str(PARALLEL_DRAFT), drafters=("parallel",))
                    estimates += run(replace(parallel, tokens_per_pass=TOKENS_PER_PASS)).estimates
                keys = {"pair": name, "sampling": sampling, "tokens": found.tokens, "texts": found.texts}
                bench.add(*(keys | {"prompts": found.prompts} | _run(each) for each in estimates))
                progress(f"{name}, {sampling}: {found.tokens} tokens in {found.texts} texts")


def _corpus(name: str, megabytes: float) -> str:
    if name == DEMO:
        return training_text(megabytes)
    from models.translation.language import pairs

    lines: list[str] = []
    size = 0
    for each in pairs("n-grams", held_out=False):
        lines.append(each.velan)
        size += len(lines[-1]) + 1
        if size >= megabytes * 1e6:
            break
    return "\n".join(lines)


def _sentences(count: int) -> Iterator[str]:
    from models.translation.language import pairs

    return (each.english for each in islice(pairs("benchmark", held_out=True), count))


def _run(each: Estimate) -> Json:
    return {
        "drafter": each.drafter,
        "lenience": f"{each.lenience:g}",
        "alpha": each.alpha if each.positions else None,
        "interval": each.interval,
        "drafted_share": each.drafted_share,
    }


def _figures(run: Json) -> Json:
    return {name: run[name] for name in ("alpha", "interval", "drafted_share", "tokens", "texts", "prompts")}


# ------------------------------------------------------------------------------------------------------------- report


def tables(document: Json) -> str:
    """[L Table 3]: a row for each drafter, a column for each way to sample; and [L Table 5]: a column a lenience."""
    summary = document["summary"]
    ways = list(SAMPLING)
    exact = [
        [pair, drafter, *(_cell(found[way][drafter]["1"]) for way in ways)]
        for pair, found in summary.items()
        for drafter in _drafters(found)
    ]
    lenient = [
        [pair, way, drafter, *(_cell(each) for each in found[way][drafter].values())]
        for pair, found in summary.items()
        for way in ways[:2]
        for drafter in _drafters(found)
    ]
    headings = [f"l = {each:g}" for each in LENIENCES]
    return "\n".join(
        [
            harness.table(["pair", "drafter", *ways], exact, "α, as in [L Table 3]"),
            harness.table(["pair", "T", "drafter", *headings], lenient, "α by lenience, as in [L Table 5]"),
        ]
    )


def _drafters(found: Json) -> list[str]:
    """Of one pair, in order."""
    return [drafter for drafter in ORDER if drafter in found["T = 1"]]


def _cell(found: Json) -> str:
    text = harness.number(found["alpha"], 3)
    if found["interval"] is not None:
        text += " ({:.3f}–{:.3f})".format(*found["interval"])
    return text if found["drafted_share"] == 1 else f"{text}, at {found['drafted_share']:.0%}"


def _point(found: Json) -> Point:
    alpha = found["alpha"]
    return None if alpha is None else (alpha, *(found["interval"] or (alpha, alpha)))


def draw(document: Json, path: Path) -> None:
    summary = document["summary"]
    note = f"Error bars: 95 % over prompts. {plots.caption(document)}"
    with picture(path, len(summary), 2, size=(5.2, 3.4), note=note) as panels:
        for (left, right), (pair, found) in zip(panels, summary.items(), strict=True):
            drafters = _drafters(found)
            series = {way: [_point(found[way][name]["1"]) for name in drafters] for way in SAMPLING}
            bars(left, drafters, series, colours=dict(zip(SAMPLING, COLOURS, strict=False)), text="{:.2f}")
            left.set(title=f"{pair} pair", ylabel="α", ylim=(0, 1))
            for name, colour in zip(ORDER, COLOURS[3:], strict=False):
                if name not in drafters:
                    continue
                points = [(float(lenience), one["alpha"]) for lenience, one in found["T = 1"][name].items()]
                line(right, points, color=colour, marker="o", label=name)
            right.legend(fontsize=7, frameon=False, loc="center right")
            right.set(title=f"{pair} pair, T = 1", xlabel="lenience l", ylim=(0, 1.02), xlim=(1.03, -0.2))
            right.set_xticks(LENIENCES, [f"{each:g}" for each in LENIENCES])


if __name__ == "__main__":
    sys.exit(main())
