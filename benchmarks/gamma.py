"""How long to speculate: every policy against the others, and against an oracle that knows what will be accepted.

All arms write the same texts, one after another on each prompt, through the same two services; only requests differ. By
default they are judged by `coupled`, and at T = 0, so that the text too is the same in every arm. The rounds of a long
γ are recorded as well: from them the policies are replayed on the times that were measured, without their noise, and
with them the oracle [L 3.5].

    python -m benchmarks.gamma            about half an hour: the demo pair, and one with a target three times as deep
    python -m benchmarks.gamma --quick    does it work at all: two prompts, the demo pair only
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks import machine
from benchmarks.arguments import pair_parser
from benchmarks.contenders import Task
from benchmarks.deepen import cached, digest_of
from benchmarks.gamma_report import ALONE, draw, summarise, table
from benchmarks.plan import TEMPERATURES, Part, Plan, Texts, read_prompts
from benchmarks.record import Record
from benchmarks.services import Processes, RunningPair, run_of
from outrider.client import Client

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".models-cache"
RESULTS = ROOT / "benchmarks" / "results"

FULL = Plan(prompts=12, new_tokens=128, repetitions=2, calibration_tokens=0, factor=3)
QUICK = Plan(prompts=2, new_tokens=24, repetitions=1, calibration_tokens=0, factor=1)
FIXED = (1, 2, 3, 4, 5, 6, 8, 12)
LONG = 16
"""γ of the rounds that are recorded for the oracle."""

CEILING = 16
BOUNDS = (2.0, 3.0)
"""Of the draft's entropy, in nats."""

Arms = Mapping[str, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)
    plan = _plan(given)
    try:
        prompts = read_prompts(given.prompts_file)
        pairs = {"demo": given.target}
        if plan.factor > 1:
            pairs[f"{plan.factor} times as deep"] = cached(given.target, plan.factor, CACHE)
        output = given.output or (CACHE / "gamma-quick.json" if given.quick else RESULTS / "gamma.json")
        record = Record.open(output, _head(plan, given, pairs, arguments), resume=given.resume)
    except (OSError, ValueError) as error:
        console.print(f"benchmarks.gamma: {error}", markup=False, soft_wrap=True)
        return 2
    arms = arms_of(given.rule, quick=given.quick)
    for name, target in pairs.items():
        texts = texts_of(target, prompts, plan)
        if all(record.has_run(**_keys(name, part)) for part in texts.parts()):
            continue
        with RunningPair(target, given.draft, Processes(apart=True)) as pair:
            measure(pair.client, name, texts, arms, record, console)
    record.put("summary", summarise(record.runs))
    draw(record.document, record.path.with_suffix(".png"))
    print(table(record.document))
    print(json.dumps({key: value for key, value in record.document.items() if key != "runs"}, ensure_ascii=False))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = pair_parser("benchmarks.gamma", __doc__ or "", quick="two prompts, few arms, the demo pair only")
    parser.add_argument("--prompts", type=int, help="how many prompts")
    parser.add_argument("--new-tokens", type=int, help="tokens of each text")
    parser.add_argument("--repetitions", type=int, help="how often each text is written in each arm")
    parser.add_argument("--factor", type=int, help="how many times as deep the deepened target is; 1: leave it out")
    parser.add_argument("--rule", default="coupled", choices=("tokenwise", "block", "coupled"), help="of acceptance")
    return parser.parse_args(arguments)


def _plan(given: argparse.Namespace) -> Plan:
    plan = QUICK if given.quick else FULL
    asked = {name: getattr(given, name) for name in ("prompts", "new_tokens", "repetitions", "factor")}
    return replace(plan, **{name: value for name, value in asked.items() if value is not None})


def _head(plan: Plan, given: argparse.Namespace, pairs: Mapping[str, Path], arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "benchmark": "gamma",
        "command": machine.command("benchmarks.gamma", arguments),
        "machine": machine.describe(),
        "load_average_before": machine.load_average(),
        "settings": plan.document() | {"rule": given.rule},
        "models": {name: [digest_of(target), digest_of(given.draft)] for name, target in pairs.items()},
    }


def arms_of(rule: str, *, quick: bool = False) -> Arms:
    """What each arm asks for, by its name."""
    fixed = (2, LONG) if quick else (*FIXED, LONG)
    bounds = BOUNDS[:1] if quick else BOUNDS
    arms: dict[str, dict[str, Any]] = {ALONE: {"gamma": 0}}
    arms |= {f"fixed {gamma}": {"gamma": gamma} for gamma in fixed}
    arms |= {name: {"gamma": CEILING, "speculation": name} for name in ("heuristic", "adaptive")}
    arms |= {f"entropy {bound:g}": {"gamma": LONG, "max_entropy": bound} for bound in bounds}
    arms |= {
        f"adaptive, entropy {bound:g}": {"gamma": CEILING, "speculation": "adaptive", "max_entropy": bound}
        for bound in bounds
    }
    return {name: {"rule": rule, **options} for name, options in arms.items()}


def measure(client: Client, name: str, texts: Texts, arms: Arms, record: Record, console: Console) -> None:
    """Puts into the record what is not there yet of one pair: each text of the plan, by every arm in turn."""
    for temperature in TEMPERATURES:
        for options in arms.values():
            _write(client, texts.warm_up(temperature), options)
    for part in texts.parts():
        keys = _keys(name, part)
        if record.has_run(**keys):
            continue
        runs = [
            {**keys, "arm": arm, **_write(client, part.task, options)} for arm, options in _in_turn(arms, part.turn)
        ]
        runs.append({**keys, "arm": None, "rounds_recorded": _recorded(client, part.task, arms)})
        record.add_runs(runs)
        told = ", ".join(f"{run['arm']} {run['tokens'] / run['seconds']:.0f}" for run in runs[:-1])
        console.print(f"{name}, T={keys['temperature']}, prompt {part.task.prompt + 1}: {told}", style="dim")


def texts_of(target: Path, prompts: Sequence[str], plan: Plan) -> Texts:
    """What is written, in the target's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    return Texts(prompts, plan, lambda text: tokenizer(text)["input_ids"])


def _keys(name: str, part: Part) -> dict[str, Any]:
    return {
        "pair": name,
        "temperature": f"{part.task.temperature:g}",
        "repetition": part.repetition,
        "prompt": part.task.prompt,
    }


def _in_turn(arms: Arms, turn: int) -> list[tuple[str, Mapping[str, Any]]]:
    """The arms, beginning with another one each turn, so that none always follows the same."""
    items = list(arms.items())
    first = 5 * turn % len(items)
    return items[first:] + items[:first]


def _asked(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "max_new_tokens": task.new_tokens,
        "ignore_eos": True,
        "temperature": task.temperature,
        "seed": task.seed,
        **options,
    }


def _write(client: Client, task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """One text of one arm."""
    begin = time.perf_counter()
    completion = client.complete(list(task.token_ids), **_asked(task, options))
    run = run_of(completion, time.perf_counter() - begin, task)
    return {**run.document(), "mean_gamma": completion.statistics.mean_gamma}


def _recorded(client: Client, task: Task, arms: Arms) -> list[list[int]]:
    """The rounds of the long γ, see `gamma_replay`; those that the text's end has cut are left out."""
    options = {**arms[f"fixed {LONG}"], "report_rounds": True}
    completion = client.complete(list(task.token_ids), **_asked(task, options))
    return [
        [each.output_length, LONG, each.accepted]
        for each in completion.samples[0].rounds
        if len(each.drafted_token_ids) == LONG
    ]


if __name__ == "__main__":
    sys.exit(main())
