"""What speculation over gRPC is worth: the target alone, the pair, and transformers' assisted generation, in turns.

Every contender writes the same number of tokens after the same prompts, at its own fastest settings, found beforehand
on other prompts; they take turns on each prompt, so that whatever else the machine does falls on all of them. Two pairs
of models: the demo pair, and the same with a deepened target (`benchmarks.deepen`).

    python -m benchmarks.pair            about a quarter of an hour
    python -m benchmarks.pair --quick    does it work at all: no tuning, few texts
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks import machine
from benchmarks.arguments import pair_parser
from benchmarks.contenders import Contender
from benchmarks.deepen import WEIGHTS, cached, digest_of
from benchmarks.local import TransformersAlone, TransformersAssisted, unload
from benchmarks.picture import draw
from benchmarks.plan import FULL, QUICK, TEMPERATURES, Part, Plan, Texts, read_prompts
from benchmarks.record import Record
from benchmarks.services import OverGrpc, RunningPair
from benchmarks.summary import ASSISTED, PAIR, summarise
from benchmarks.tables import show
from benchmarks.tuning import Tuned, Tuner

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".models-cache"
RESULTS = ROOT / "benchmarks" / "results"
# Where there is no terminal to ask.
TABLE_WIDTH = 140

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Models:
    """Two folders that go together."""

    name: str
    target: Path
    draft: Path

    def document(self) -> dict[str, Any]:
        """As JSON: what they are, not where they lie."""
        config = json.loads((self.target / "config.json").read_text(encoding="utf-8"))
        return {
            "target": self.target.name,
            "draft": self.draft.name,
            "target_layers": config["num_hidden_layers"],
            "target_mib": round((self.target / WEIGHTS).stat().st_size / 2**20, 1),
            "draft_mib": round((self.draft / WEIGHTS).stat().st_size / 2**20, 1),
            "digests": [digest_of(self.target), digest_of(self.draft)],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)

    def told(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)

    plan = _plan(given)
    try:
        prompts = read_prompts(given.prompts_file)
        pairs = _pairs(given, plan)
        record = Record.open(given.output or _default_output(given), _head(plan, pairs, arguments), resume=given.resume)
    except (OSError, ValueError) as error:
        told(f"benchmarks.pair: {error}")
        return 2
    for models in pairs:
        _measure(models, plan, prompts, record, told)
        unload()
    record.put("summary", summarise(record.runs))
    show(record.document, Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH))
    draw(record.document, record.path.with_suffix(".png"))
    print(json.dumps({key: value for key, value in record.document.items() if key != "runs"}, ensure_ascii=False))
    return 0


# -------------------------------------------------------------------------------------------------------- what is asked


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = pair_parser("benchmarks.pair", __doc__ or "", quick="few texts, the demo pair only, no tuning")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument(
        "--factor", type=_positive, help="how many times as deep the deepened target is; 1: leave it out"
    )
    parser.add_argument("--prompts", type=_positive, help="how many prompts")
    parser.add_argument("--new-tokens", type=_positive, help="tokens of each text")
    parser.add_argument("--repetitions", type=_positive, help="how often each text is written by each contender")
    parser.add_argument("--calibration-tokens", type=int, help="tokens of each text to tune on; 0: do not tune")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _plan(given: argparse.Namespace) -> Plan:
    plan = QUICK if given.quick else FULL
    return replace(
        plan, **{name: value for name in plan.document() if (value := getattr(given, name, None)) is not None}
    )


def _pairs(given: argparse.Namespace, plan: Plan) -> list[Models]:
    pairs = [Models("demo", given.target, given.draft)] if given.only != "deepened" else []
    if plan.factor > 1 and given.only != "demo":
        pairs.append(Models("deepened", cached(given.target, plan.factor, CACHE), given.draft))
    return pairs


def _default_output(given: argparse.Namespace) -> Path:
    return CACHE / "pair-quick.json" if given.quick else RESULTS / "pair.json"


def _head(plan: Plan, pairs: Sequence[Models], arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "benchmark": "pair",
        "command": machine.command("benchmarks.pair", arguments),
        "machine": machine.describe(),
        "load_average_before": machine.load_average(),
        "settings": plan.document(),
        "models": {models.name: models.document() for models in pairs},
    }


# ------------------------------------------------------------------------------------------------------------- one pair


def _measure(models: Models, plan: Plan, prompts: Sequence[str], record: Record, told: Told) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.target, local_files_only=True)
    texts = Texts(prompts, plan, lambda text: tokenizer(text)["input_ids"])
    left = [part for part in texts.parts() if not record.has_run(**_keys(models, part))]
    if not left:
        return
    chosen = record.once("tuning", models.name, lambda: _tune(models, plan, texts, told))
    with ExitStack() as running:
        contenders = _contenders(models, Tuned.of(chosen["settings"]), running)
        for temperature, by_name in contenders.items():
            for contender in by_name.values():
                contender.write(texts.warm_up(temperature))
        for part in left:
            keys = _keys(models, part)
            runs = [
                {**keys, "contender": name, "settings": contender.settings(), **contender.write(part.task).document()}
                for name, contender in _in_turn(contenders[part.task.temperature], part.turn)
            ]
            record.add_runs(runs)
            told(_line(keys, runs))


def _keys(models: Models, part: Part) -> dict[str, Any]:
    """What names a part among all runs of the document."""
    return {
        "pair": models.name,
        "temperature": f"{part.task.temperature:g}",
        "repetition": part.repetition,
        "prompt": part.task.prompt,
    }


def _tune(models: Models, plan: Plan, texts: Texts, told: Told) -> dict[str, Any]:
    if not plan.calibration_tokens:
        return {"settings": Tuned.untuned(TEMPERATURES).document(), "tried": []}
    tuner = Tuner(models.target, models.draft, texts.calibration(), lambda line: told(f"{models.name}: {line}"))
    return {"settings": tuner.tune().document(), "tried": tuner.tried}


def _contenders(models: Models, tuned: Tuned, running: ExitStack) -> dict[float, dict[str, Contender]]:
    """All contenders by temperature and name. Services are shared where their settings are the same."""
    pairs = {
        how: running.enter_context(RunningPair(models.target, models.draft, how))
        for how in dict.fromkeys((tuned.alone, tuned.pair))
    }
    return {
        temperature: {
            "transformers": TransformersAlone(models.target, tuned.transformers),
            "outrider-alone": OverGrpc(pairs[tuned.alone], 0),
            ASSISTED: TransformersAssisted(models.target, models.draft, tuned.assisted, tuned.assistance[temperature]),
            PAIR: OverGrpc(pairs[tuned.pair], tuned.gamma[temperature]),
        }
        for temperature in TEMPERATURES
    }


def _in_turn(contenders: dict[str, Contender], turn: int) -> list[tuple[str, Contender]]:
    """The contenders, beginning with another one each turn, so that none always follows the same."""
    items = list(contenders.items())
    first = turn % len(items)
    return items[first:] + items[:first]


def _line(keys: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    where = f"{keys['pair']}, repetition {keys['repetition'] + 1}, prompt {keys['prompt'] + 1}, T={keys['temperature']}"
    return f"{where}: " + ", ".join(f"{run['contender']} {run['tokens'] / run['seconds']:.1f}" for run in runs)


if __name__ == "__main__":
    sys.exit(main())
