"""How many drafted tokens each exact rule accepts: through both services, on equal prompts, with equally many rounds.

Counts do not depend on what else the machine does. Beside them stands an estimate of far less noise: the drafts of the
texts are drawn again and the uniforms of acceptance integrated out (`benchmarks.acceptance`), so that `tokenwise` and
`block` are compared on the same drafts.

    python -m benchmarks.rules            about ten minutes on one core
    python -m benchmarks.rules --quick    does it work at all: two prompts, few rounds
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.acceptance import EXPECTED
from benchmarks.arguments import pair_parser
from benchmarks.deepen import digest_of
from benchmarks.plan import read_prompts, spread
from benchmarks.record import Record
from benchmarks.replay import Replay, Target, Written
from benchmarks.rules_report import draw, summarise, table
from benchmarks.services import Processes, RunningPair
from outrider.client import AcceptanceRule, Chunk, Client, Round, Started

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / ".models-cache"
LOSSY = (AcceptanceRule.UNSPECIFIED, AcceptanceRule.SIGMOID)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is written: `rounds` of each of `prompts` in every arm, an arm being a temperature, a γ and a rule."""

    prompts: int
    rounds: int
    temperatures: tuple[float, ...] = (0.7, 1.0)
    gammas: tuple[int, ...] = (2, 4, 8)


FULL = Plan(prompts=64, rounds=16)
QUICK = Plan(prompts=2, rounds=3, temperatures=(1.0,), gammas=(2, 3))


@dataclass(frozen=True, slots=True)
class Arm:
    """What is counted apart."""

    temperature: float
    gamma: int
    rule: AcceptanceRule

    def keys(self) -> dict[str, Any]:
        """What names it in the document."""
        return {"temperature": f"{self.temperature:g}", "gamma": self.gamma, "rule": self.rule.value}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)
    plan = QUICK if given.quick else FULL
    try:
        prompts = spread(read_prompts(given.prompts_file), plan.prompts)
        output = given.output or (CACHE / "rules-quick.json" if given.quick else RESULTS / "rules.json")
        record = Record.open(output, _head(plan, given, arguments), resume=given.resume)
    except (OSError, ValueError) as error:
        console.print(f"benchmarks.rules: {error}", markup=False, soft_wrap=True)
        return 2
    with RunningPair(given.target, given.draft, Processes("float32", 1, "float32", 1)) as pair:
        measure(pair.client, given.target, plan, prompts, record, console)
    record.put("summary", summarise(record.runs))
    draw(record.document, record.path.with_suffix(".png"))
    print(table(record.document))
    print(json.dumps({key: value for key, value in record.document.items() if key != "runs"}, ensure_ascii=False))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = pair_parser("benchmarks.rules", __doc__ or "", quick="two prompts, few rounds")
    return parser.parse_args(arguments)


def _head(plan: Plan, given: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "benchmark": "rules",
        "command": machine.command("benchmarks.rules", arguments),
        "machine": machine.describe(),
        "settings": json.loads(json.dumps(asdict(plan))),
        "models": {"target": digest_of(given.target), "draft": digest_of(given.draft)},
    }


def measure(client: Client, target: Path, plan: Plan, prompts: Sequence[str], record: Record, console: Console) -> None:
    """Puts into the record what is not there yet: every arm of every exact rule that the service offers."""
    told = client.get_model()
    offered = [rule for rule in map(AcceptanceRule.of, told.model.rules) if rule not in LOSSY]
    with Replay(client.address, Target(target, told.target.vocab_size)) as replay:
        for arm in _arms(plan, offered):
            if record.has_run(**arm.keys()):
                continue
            runs = []
            for number, prompt in enumerate(prompts):
                text = write(client, prompt, arm, seed=1 + number, rounds=plan.rounds)
                runs.append({**arm.keys(), "prompt": number, **_judged(text, arm, replay)})
            record.add_runs(runs)
            accepted = sum(run["accepted"] for run in runs) / sum(run["rounds"] for run in runs)
            where = ", ".join(f"{name} {value}" for name, value in arm.keys().items())
            console.print(f"{where}: {accepted:.3f} accepted a round", style="dim", markup=False)


def _arms(plan: Plan, rules: Sequence[AcceptanceRule]) -> Iterator[Arm]:
    for temperature in plan.temperatures:
        for gamma in plan.gammas:
            for rule in rules:
                yield Arm(temperature, gamma, rule)


def write(client: Client, prompt: str, arm: Arm, *, seed: int, rounds: int) -> Written:
    """A text of `rounds` whole rounds; what comes after them is left."""
    output: list[int] = []
    reports: list[Round] = []
    tokens: tuple[int, ...] = ()
    events = client.generate(
        prompt,
        max_new_tokens=(rounds + 1) * (arm.gamma + 1),  # so that the limit shortens none of them
        ignore_eos=True,
        temperature=arm.temperature,
        seed=seed,
        rule=arm.rule,
        gamma=arm.gamma,
        report_rounds=True,
    )
    for event in events:
        if isinstance(event, Started):
            tokens = event.prompt_token_ids
        elif isinstance(event, Chunk):
            output += event.token_ids
            reports += event.rounds
        if len(reports) >= rounds and len(output) >= reports[rounds - 1].output_length:
            break
    events.close()
    kept = reports[:rounds]
    return Written(
        prompt=tokens,
        seed=seed,
        rule=arm.rule,
        output=tuple(output),
        bases=tuple(report.output_length for report in kept),
        drafted=tuple(report.drafted_token_ids for report in kept),
        accepted=tuple(report.accepted for report in kept),
    )


def _judged(text: Written, arm: Arm, replay: Replay) -> dict[str, Any]:
    """Counts of one text, and what each rule would accept of its drafts in expectation: sums over its rounds."""
    counts: dict[str, Any] = {"rounds": len(text.bases), "accepted": sum(text.accepted)}
    if arm.rule.value not in EXPECTED:
        return counts
    expected = dict.fromkeys(EXPECTED, 0.0)
    redrafted = 0
    for drafted, (tokens, path) in zip(
        text.drafted, replay.rounds(text, temperature=arm.temperature, gamma=arm.gamma), strict=True
    ):
        redrafted += tuple(tokens) == drafted
        for rule, formula in EXPECTED.items():
            expected[rule] += formula(path)
    return counts | {"redrafted": redrafted, "expected": {rule: round(sum_, 6) for rule, sum_ in expected.items()}}


if __name__ == "__main__":
    sys.exit(main())
