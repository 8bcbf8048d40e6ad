"""The lossy rule `sigmoid` [W 3.2.2]: its loss in distribution and its gain in tokens, on the demo pair.

Its page is `docs/explanation/lossy-rules.md`.

Acceptance and distances are computed from the distributions, at every position of texts that the target wrote at
temperature 1; only the rounds of several tokens are drawn. With q the distribution that drafts are sampled from, a(x)
the chance that x is accepted, and r the distribution after a rejection, the output has q·a + (1 - Σ q·a)·r. Its time
is in `benchmarks.verification`.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks import harness
from benchmarks.harness import Bench, Json, progress
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sigmoid import SigmoidScales, draft_logits
from kernels.sparse import SparseConfig, SparseDistribution, truncate
from kernels.verify import Proposed, Rule, verify
from models.generation import Writer, steps
from models.measure import load, until_end
from models.tokenizer import load_tokenizer
from outrider.evaluation import pictures
from outrider.evaluation.intervals import ratio_error, student_quantile

PAPERS = (1e1, 1e3, 1e4, 1e5)  # ± of [W Tables 2 and 7]
SWEEP = [round(10 ** (k / 4), 6) for k in range(-4, 21)]
ONE_APART = range(-10, 31, 2)  # α of the other sweep, in which β is α + 1
PROMPT_TOKENS, GAMMA = 16, 5
PLAIN = SamplingParams()
KEPT = SparseConfig()  # the default of the draft service


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("sigmoid", __doc__, quick="two texts")
    parser.set_defaults(texts=64, tokens=48)  # texts of one prompt and so many tokens each
    few = {"texts": 2, "tokens": 16}

    def table(document: Json) -> str:
        return "\n\n".join(tables(document).values())

    def measure(bench: Bench) -> None:
        bench.document |= bench.once("figures", lambda: _measured(bench))

    given = harness.parse(parser, arguments, few)
    return harness.run("sigmoid", given, measure, lambda bench: {}, table, draw)


def _measured(bench: Bench) -> Json:
    given = bench.given
    target, draft = load(given.target), load(given.draft)
    texts = texts_of(bench, target, draft, PROMPT_TOKENS)
    progress("drafting rounds")
    cases = rounds(target, draft, texts, GAMMA, every=8)
    progress("verifying")
    return figures(texts, cases)


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of the target's logits, the draft's, and each step from logits to scores."""

    name: str
    target: torch.dtype
    draft: torch.dtype
    steps: torch.dtype


SERVICES = Precision("as served", torch.float32, torch.float16, torch.float64)
FLOAT32 = Precision("float32", torch.float32, torch.float32, torch.float32)
FLOAT16 = Precision("float16", torch.float16, torch.float16, torch.float16)
PRECISIONS = (SERVICES, FLOAT32, FLOAT16)
FIELDS = ("acceptance", "from_target", "from_draft", "distinct")

Places = Mapping[str, Tensor]
"""Of drafted tokens, `[N]` each, NaN where scores are no numbers: Σ q·a; the total variation of the output from p and
from q; how many values p̂ has among the tokens."""


def by_sigmoid(z: Tensor, v: Tensor, q: Tensor, scales: SigmoidScales, precision: Precision) -> Places:
    """The places of target logits `z`, draft logits `v` and the distributions `q` drawn from, `[N, V]` each."""
    p_hat = _scores(z.to(precision.target), scales, precision.steps)
    q_hat = _scores(v.to(precision.draft), scales, precision.steps)
    return _accepted_by(torch.softmax(z.double(), -1), q.double(), p_hat.double(), q_hat.double())


def by_tokenwise(z: Tensor, q: Tensor) -> Places:
    """The same under the exact rule: the output is p [L A.1]."""
    p = torch.softmax(z.double(), -1)
    return _accepted_by(p, q.double(), p, q.double())


def _scores(z: Tensor, scales: SigmoidScales, steps: torch.dtype) -> Tensor:
    alpha, beta = (torch.tensor(value, dtype=torch.float64).to(steps) for value in (scales.alpha, scales.beta))
    return torch.sigmoid((z.to(steps) - alpha) / (beta - alpha))


def _accepted_by(p: Tensor, q: Tensor, p_hat: Tensor, q_hat: Tensor) -> Places:
    """Drafts of q are accepted with min(1, p̂/q̂), or else replaced by norm(max(0, p̂ - q̂)); by p where that is 0."""
    chance = torch.where(q_hat > 0, (p_hat / q_hat).clamp(max=1), 0.0)
    chance = torch.where(p_hat.isnan() | q_hat.isnan(), torch.nan, chance)
    acceptance = (q * chance).sum(-1)
    rest = (p_hat - q_hat).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    written = q * chance + (1 - acceptance)[:, None] * torch.where(mass == 0, p, rest / mass)
    distinct = [math.nan if bool(row.isnan().any()) else float(len(row.unique())) for row in p_hat]
    return {
        "acceptance": acceptance,
        "from_target": total_variation(written, p),
        "from_draft": total_variation(written, q),
        "distinct": torch.tensor(distinct, dtype=torch.float64),
    }


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Σ |a - b| / 2 of each pair of rows, `[N]`."""
    return (a - b).abs().sum(-1) / 2


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of the target at temperature 1, with the logits of both models."""

    ids: Tensor  # prompts and texts, `[B, L]`
    begin: int  # where the prompts end
    target: Tensor  # the target's logits of each written position, `[B, L - begin, V]` float32
    draft: Tensor  # the draft's
    alive: Tensor  # the positions up to the text's end, bool `[B, L - begin]`

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self.target[self.alive], self.draft[self.alive]


@torch.no_grad()
def write(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Tensor, tokens: int, end: int) -> Texts:
    """The target continues `prompts` `[B, n]` by `tokens` each, drawn at temperature 1."""
    generator = torch.Generator().manual_seed(20)
    written, logits = zip(*steps(target, prompts, tokens, torch.ones(len(prompts)), generator), strict=True)
    ids = torch.cat(written[:-1], dim=1)
    begin = prompts.shape[1]
    return Texts(
        ids=ids,
        begin=begin,
        target=torch.cat([logits[0][:, -1:], *logits[1:-2]], dim=1),
        draft=Writer(draft, *ids.shape).extend(ids)[:, begin - 1 : -1],
        alive=until_end(ids[:, begin:], end),
    )


def texts_of(bench: Bench, target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt_tokens: int) -> Texts:
    """Texts after the first tokens of prompts that have as many, on one thread."""
    given = bench.given
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(given.target)
    rows = [tokenizer(text)["input_ids"][:prompt_tokens] for text in bench.prompts]
    prompts = torch.tensor([row for row in rows if len(row) == prompt_tokens][: given.texts])
    progress(f"writing {len(prompts)} texts")
    return write(target, draft, prompts, given.tokens, tokenizer.eos_token_id)


def truncated(logits: Tensor) -> list[SparseDistribution]:
    """q̂ of each row of draft logits `[N, V]`."""
    return [truncate(row, KEPT) for row in probabilities(logits, PLAIN).numpy()]


def drawn_from(draft: Tensor) -> Tensor:
    """q̂ of draft logits `[N, V]`, float64."""
    q = torch.zeros(draft.shape, dtype=torch.float64)
    for row, kept in zip(q, truncated(draft), strict=True):
        row[torch.from_numpy(kept.ids)] = torch.from_numpy(kept.weights.astype("float64")) / kept.total
    return q


@dataclass(frozen=True, slots=True)
class Case:
    """One proposal of γ tokens, with the logits of the target `[γ+1, V]` and of the draft `[γ, V]`."""

    target: Tensor
    draft: Tensor
    tokens: tuple[int, ...]
    q: tuple[SparseDistribution, ...]
    seed: int
    base_length: int

    def proposed(self, rule: Rule, scales: SigmoidScales | None = None) -> Proposed:
        """For one rule."""
        plain = Proposed(self.tokens, self.q, PLAIN, self.seed, self.base_length, rule=rule)
        if rule is Rule.SIGMOID:
            return replace(plain, q=tuple(draft_logits(self.draft, PLAIN)), sigmoid=scales)
        return plain


@torch.no_grad()
def rounds(target: LlamaForCausalLM, draft: LlamaForCausalLM, texts: Texts, gamma: int, every: int) -> list[Case]:
    """Drafts `gamma` tokens at every `every`-th position of each text, and runs the target on them."""
    cases = []
    for base in range(texts.begin, texts.ids.shape[1], every):
        prefix = texts.ids[:, :base]
        writer, drafted, draft_rows = Writer(draft, len(prefix), base + gamma), prefix, []
        kept: list[list[SparseDistribution]] = []
        logits = writer.extend(prefix)[:, -1]
        for place in range(gamma):
            draft_rows.append(logits)
            kept.append(truncated(logits))
            drawn = [own.token_at(uniform(row, base, place, Domain.DRAFT)) for row, own in enumerate(kept[-1])]
            drafted = torch.cat((drafted, torch.tensor(drawn)[:, None]), dim=1)
            if place < gamma - 1:
                logits = writer.extend(drafted[:, -1:])[:, -1]
        rows = Writer(target, *drafted.shape).extend(drafted)[:, base - 1 :]
        for b in range(len(prefix)):
            if bool(texts.alive[b, base - texts.begin]):
                tokens = tuple(drafted[b, base:].tolist())
                draft_logits_of_b = torch.stack([each[b] for each in draft_rows])
                cases.append(Case(rows[b], draft_logits_of_b, tokens, tuple(each[b] for each in kept), b, base))
    return cases


def figures(texts: Texts, cases: Sequence[Case]) -> Json:
    sparse = [6 * len(q.ids) for case in cases for q in case.q]  # bytes on the wire
    return {
        "distributions": _distributions(*texts.places),
        "rounds": _rounds(cases),
        "bytes": {"sparse_mean": statistics.mean(sparse), "logits": 2 * cases[0].target.shape[1]},
    }


def _around(scale: float) -> SigmoidScales:
    return SigmoidScales(-scale, scale)


def _distributions(z: Tensor, v: Tensor) -> Json:
    """Means over places of target logits `z` and draft logits `v`, `[N, V]`; None where a score is no number."""
    pieces = [(a, b, drawn_from(b)) for a, b in zip(z.split(256), v.split(256), strict=True)]

    def means(parts: Sequence[Places]) -> Json:
        found = {name: float(torch.cat([part[name] for part in parts]).mean()) for name in FIELDS}
        return {name: round(value, 9) if math.isfinite(value) else None for name, value in found.items()}

    def by(scales: SigmoidScales, precision: Precision = SERVICES) -> Json:
        return means([by_sigmoid(a, b, q, scales, precision) for a, b, q in pieces])

    apart = torch.cat([total_variation(torch.softmax(a.double(), -1), q) for a, _, q in pieces])
    return {
        "places": len(z),
        "target_from_draft": float(apart.mean()),
        "target_from_draft_error": float(apart.std() / len(apart) ** 0.5),
        "tokenwise": means([by_tokenwise(a, q) for a, _, q in pieces]),
        "sigmoid": {each.name: {f"{scale:g}": by(_around(scale), each) for scale in PAPERS} for each in PRECISIONS},
        "around_zero": {f"{scale:g}": by(_around(scale)) for scale in SWEEP},
        "one_apart": {f"{at}": by(SigmoidScales(at, at + 1)) for at in ONE_APART},
    }


def _rounds(cases: Sequence[Case]) -> Json:
    """Tokens of a round of γ drafts under each rule, on the same drafts and draws.

    `error` is half of the 95 % interval, over texts: rounds of one text depend on each other.
    """
    ways: dict[str, tuple[Rule, SigmoidScales | None]] = {
        "tokenwise": (Rule.TOKENWISE, None),
        "block": (Rule.BLOCK, None),
        **{f"sigmoid ±{scale:g}": (Rule.SIGMOID, _around(scale)) for scale in PAPERS},
    }
    logits, found = torch.cat([case.target for case in cases]), {}
    for name, (rule, scales) in ways.items():
        counts = [result.accepted for result in verify(logits, [case.proposed(rule, scales) for case in cases])]
        mean = statistics.mean(counts)
        found[name] = {"tokens": mean + 1, "error": _margin(cases, counts), "drafts_accepted": mean / GAMMA}
    return {"gamma": GAMMA, "rounds": len(cases), "by_rule": found}


def _margin(cases: Sequence[Case], counts: Sequence[int]) -> float:
    """Half of the 95 % interval of the mean count; the unit is a text."""
    by_text: dict[int, list[int]] = {}
    for case, count in zip(cases, counts, strict=True):
        by_text.setdefault(case.seed, []).append(count)
    error = ratio_error([sum(own) for own in by_text.values()], [len(own) for own in by_text.values()])
    if error is None:
        raise ValueError("an interval needs two texts")
    return student_quantile(len(by_text) - 1) * error


def tables(document: Json) -> dict[str, str]:
    found = document["distributions"]
    exact, apart, by_precision = found["tokenwise"], found["target_from_draft"], found["sigmoid"]
    scales = list(by_precision["as served"])
    served = [
        [f"`sigmoid` {_scale(scale)}", _share(each["acceptance"]), _tv(each["from_target"]), _tv(each["from_draft"])]
        for scale, each in by_precision["as served"].items()
    ]
    precision = [
        [_scale(scale), *(cell for by_scale in by_precision.values() for cell in _precise(by_scale[scale]))]
        for scale in scales
    ]
    several = [
        [_rule(name), f"{each['tokens']:.2f} ± {each['error']:.2f}", _share(each["drafts_accepted"])]
        for name, each in document["rounds"]["by_rule"].items()
    ]
    what = ("scores", "acceptance", "TV(text, target)")
    rows = [
        ["`tokenwise`, `block`", _share(exact["acceptance"]), "0", _tv(apart)],
        *served,
        ["the draft alone", "", _tv(apart), "0"],
    ]
    return {
        "distributions": harness.table(["rule", "acceptance", "TV(text, target)", "TV(text, draft)"], rows),
        "precision": harness.table(
            ["scales", *(f"{name}: {each}" for name in by_precision for each in what)], precision
        ),
        "rounds": harness.table(
            ["rule", f"tokens of a round, γ = {document['rounds']['gamma']}", "drafts accepted"], several
        ),
    }


def _precise(each: Json) -> tuple[str, str, str]:
    count = "no number" if each["distinct"] is None else f"{each['distinct']:,.0f}"
    return count, _share(each["acceptance"]), _tv(each["from_target"])


def _rule(name: str) -> str:
    if " ±" in name:
        rule, scale = name.split(" ±")
        return f"`{rule}` {_scale(scale)}"
    return f"`{name}`"


def _scale(scale: str) -> str:
    return f"±{int(float(scale)):,}"


def _share(value: float | None) -> str:
    if value is None:
        return "no number"
    if value == 1:
        return "100 %"
    return f"{100 * value:.2f} %" if value < 0.9999 else f"{100 * value:.5f} %"


def _tv(value: float | None) -> str:
    return "no number" if value is None else f"{value:.5f}"


def draw(document: Json, path: Path) -> None:
    found = document["distributions"]
    apart, exact = found["target_from_draft"], found["tokenwise"]["acceptance"]
    note = f"The demo pair at temperature 1, {found['places']:,} places. Circles: the scales of Wagner et al."
    with pictures.picture(path, 2, 2, size=(5.2, 3.3), note=note) as panels:
        for (upper, lower), sweep in zip(panels.T, ("around_zero", "one_apart"), strict=True):
            pictures.level(upper, 0, linewidth=3, alpha=0.35, linestyle="-", label="exact rules: text from target")
            pictures.level(upper, apart, color=pictures.GREY, linestyle="--", label="draft from target")
            _line(upper, found, sweep, "from_target", pictures.BLUE, "sigmoid: text from target")
            _line(upper, found, sweep, "from_draft", pictures.ORANGE, "sigmoid: text from draft")
            upper.set_ylim(-0.05 * apart, 1.2 * apart)
            pictures.level(lower, exact, linewidth=3, alpha=0.35, linestyle="-")
            lower.annotate(
                "tokenwise", (0.98, exact + 0.01), xycoords=("axes fraction", "data"), ha="right", fontsize=8
            )
            _line(lower, found, sweep, "acceptance", pictures.BLUE, "sigmoid")
            lower.set_ylim(0.5, 1.02)
        panels[0][0].set_title("α = -s, β = s, as Wagner et al. have it", fontsize=10)
        panels[0][1].set_title("β = α + 1", fontsize=10)
        panels[0][0].set_ylabel("total variation")
        panels[1][0].set_ylabel("acceptance")
        for panel in panels[:, 0]:
            panel.set_xscale("log")
        panels[1][0].set_xlabel("s")
        panels[1][1].set_xlabel("α")


def _line(panel: Any, found: Json, sweep: str, field: str, colour: str, label: str) -> None:
    pictures.line(panel, [(float(at), each[field]) for at, each in found[sweep].items()], color=colour, label=label)
    if sweep == "around_zero":
        papers = [(float(at), each[field]) for at, each in found["sigmoid"]["as served"].items()]
        pictures.line(panel, papers, linestyle="none", marker="o", markerfacecolor="white", markeredgecolor=colour)


if __name__ == "__main__":
    sys.exit(main())
