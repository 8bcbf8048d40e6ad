"""What the lossy rule `sigmoid` [W 3.2.2] costs in law and buys in time, on the demo pair: `docs/sigmoid.md` has it.

Acceptance and distances come from the laws themselves, at every place of texts that the target wrote at temperature 1;
only the rounds of several tokens are drawn. Speed is told in ratios alone, on the host path, all rules in turns in one
run. It prints the tables, and writes them with one JSON document and a picture.

    python -m benchmarks.sigmoid
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.arguments import DEMO
from benchmarks.sigmoid_laws import PRECISIONS, SERVICES, Places, Precision, by_sigmoid, by_tokenwise, total_variation
from benchmarks.sigmoid_picture import draw
from benchmarks.sigmoid_rounds import Case, Texts, Way, accepted, drawn_from, rounds, synthetic, timed, write
from benchmarks.sigmoid_tables import tables
from kernels.verify import Rule, SigmoidScales
from models.measure import load
from models.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PAPERS = (1e1, 1e3, 1e4, 1e5)  # ± of [W Tables 2 and 7]
SWEEP = [round(10 ** (k / 4), 6) for k in range(-4, 21)]
ONE_APART = range(-10, 31, 2)  # α of the other sweep, in which β is α + 1
PROMPT_TOKENS, GAMMA, LARGE = 16, 5, 151_936

Json = dict[str, Any]


def _around(scale: float) -> SigmoidScales:
    return SigmoidScales(-scale, scale)


def _means(places: Places) -> Json:
    """Means over places; None where a score is no number at any place."""
    fields = ("acceptance", "from_target", "from_draft", "distinct")
    return {name: _number(float(getattr(places, name).mean())) for name in fields}


def _number(value: float) -> float | None:
    return round(value, 9) if math.isfinite(value) else None


def _joined(parts: list[Places]) -> Places:
    names = ("acceptance", "from_target", "from_draft", "distinct")
    return Places(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def measure_laws(z: Tensor, v: Tensor) -> Json:
    """Acceptance and distances at places of target logits `z` and draft logits `v`, `[N, V]`."""
    pieces = [(a, b, drawn_from(b)) for a, b in zip(z.split(256), v.split(256), strict=True)]

    def by(scales: SigmoidScales, precision: Precision) -> Json:
        return _means(_joined([by_sigmoid(a, b, q, scales, precision) for a, b, q in pieces]))

    apart = torch.cat([total_variation(torch.softmax(a.double(), -1), q) for a, _, q in pieces])
    whole = torch.cat([torch.minimum(torch.softmax(a, -1), torch.softmax(b, -1)).sum(-1) for a, b, _ in pieces])
    return {
        "places": len(z),
        "target_from_draft": round(float(apart.mean()), 6),
        "target_from_draft_error": round(float(apart.std() / len(apart) ** 0.5), 6),
        "acceptance_of_whole_draft": round(float(whole.mean()), 6),
        "tokenwise": _means(_joined([by_tokenwise(a, q) for a, _, q in pieces])),
        "sigmoid": {
            precision.name: {f"{scale:g}": by(_around(scale), precision) for scale in PAPERS}
            for precision in PRECISIONS
        },
        "around_zero": {f"{scale:g}": by(_around(scale), SERVICES) for scale in SWEEP},
        "one_apart": {f"{at}": by(SigmoidScales(at, at + 1), SERVICES) for at in ONE_APART},
    }


def measure_rounds(cases: list[Case]) -> Json:
    """Tokens of a round of γ drafts under each rule, on the same drafts and draws."""
    ways: dict[str, tuple[Rule, SigmoidScales | None]] = {
        "tokenwise": (Rule.TOKENWISE, None),
        "block": (Rule.BLOCK, None),
        **{f"sigmoid ±{scale:g}": (Rule.SIGMOID, _around(scale)) for scale in PAPERS},
    }
    found = {}
    for name, (rule, scales) in ways.items():
        counts = accepted(cases, rule, scales)
        found[name] = {
            "tokens": round(statistics.mean(counts) + 1, 4),
            "error": round(statistics.stdev(counts) / len(counts) ** 0.5, 4),
            "drafts_accepted": round(statistics.mean(counts) / GAMMA, 4),
        }
    return {"gamma": GAMMA, "rounds": len(cases), "by_rule": found}


def measure_speed(cases: list[Case], repeats: int) -> Json:
    """Time of one verification, over that of tokenwise on the same round."""
    ways = [
        Way("tokenwise", Rule.TOKENWISE),
        Way("tokenwise, dense q", Rule.TOKENWISE, dense=True),
        Way("block", Rule.BLOCK),
        Way("sigmoid ±10", Rule.SIGMOID, _around(10)),
        Way("sigmoid ±10000", Rule.SIGMOID, _around(1e4)),
    ]
    demo, large = cases[:: max(1, len(cases) // 64)], synthetic(LARGE, GAMMA, 6)
    return {
        "gamma": GAMMA,
        "threads": torch.get_num_threads(),
        "by_vocabulary": {
            f"{demo[0].target.shape[1]}": timed(demo, ways, repeats),
            f"{LARGE}": timed(large, ways, repeats * 2),
        },
    }


def measure_bytes(cases: list[Case]) -> Json:
    """Bytes of one drafted token on the wire: a sparse law has 6 a token of its support, logits 2 an id."""
    sparse = [6 * len(law.ids) for case in cases for law in case.laws]
    return {"sparse_mean": round(statistics.mean(sparse), 1), "logits": 2 * cases[0].target.shape[1]}


def measure(texts: Texts, cases: list[Case], repeats: int) -> Json:
    """All of it."""
    z, v = texts.places
    return {
        "laws": measure_laws(z, v),
        "rounds": measure_rounds(cases),
        "bytes": measure_bytes(cases),
        "speed": measure_speed(cases, repeats),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the lossy rule sigmoid on the demo pair.")
    parser.add_argument("--texts", type=int, default=64, help="texts, of one prompt each (default 64, the most)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each text (default 48)")
    parser.add_argument("--repeats", type=int, default=5, help="how often each round is timed (default 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(DEMO / "target")
    target, draft = load(DEMO / "target"), load(DEMO / "draft")
    prompts = _prompts(tokenizer, arguments.texts)
    print(f"writing {len(prompts)} texts", file=sys.stderr)
    texts = write(target, draft, prompts, arguments.tokens, tokenizer.eos_token_id)
    print("drafting rounds", file=sys.stderr)
    cases = rounds(target, draft, texts, GAMMA, every=8)
    print("judging and timing", file=sys.stderr)
    document = {
        "machine": machine.describe(),
        "command": machine.command("benchmarks.sigmoid", sys.argv[1:]),
        "settings": {"texts": len(prompts), "tokens": arguments.tokens, "repeats": arguments.repeats},
        **measure(texts, cases, arguments.repeats),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sigmoid.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    draw(document, arguments.out / "sigmoid.png")
    print("\n\n".join(tables(document).values()))
    return 0


def _prompts(tokenizer: Any, count: int) -> Tensor:
    """The first tokens of the demo's prompts, `[B, n]`; those that have fewer are left out."""
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tokenizer(json.loads(line)["text"])["input_ids"][:PROMPT_TOKENS] for line in lines]
    return torch.tensor([row for row in rows if len(row) == PROMPT_TOKENS][:count])


if __name__ == "__main__":
    sys.exit(main())
