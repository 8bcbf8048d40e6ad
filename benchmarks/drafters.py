"""What each drafter is worth: α and tokens/s on code to go on with and on code to be written once more.

Every drafter writes every text through both services, one after the other, beginning with another one each time; ratios
are to `none`, the target alone, in the same repetition. `ngram` counts what the demo target was trained on, none of
which is in the prompts.

    python -m benchmarks.drafters            the demo pair and a deepened one, about half an hour on two cores
    python -m benchmarks.drafters --resume   goes on where the same command was interrupted
    python -m benchmarks.drafters --quick    does it work at all: the demo pair, few texts
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import pair_parser
from benchmarks.contenders import Task, check_length, digest
from benchmarks.deepen import cached
from benchmarks.drafters_picture import draw
from benchmarks.drafters_summary import DRAFTERS, show, summarise
from benchmarks.pair import CACHE, RESULTS, Models
from benchmarks.plan import TEMPERATURES, read_prompts, spread
from benchmarks.record import Record
from benchmarks.services import Processes, RunningPair, phases
from models.corpus import training_documents

TABLE_WIDTH = 140
# Judged token by token, so that α is the paper's.
RULE = "tokenwise"

Json = dict[str, Any]
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is written.

    Attributes:
        prompts: of each kind.
        new_tokens: tokens of each text.
        repetitions: how often each text is written by each drafter, with other seeds.
        gamma: tokens of a proposal.
        corpus_mb: MB of the training text that `ngram` counts.
        factor: how many times as deep the deepened target is; 1: there is none.
        staged_by: what guesses for the draft model in `staged`.
    """

    prompts: int = 12
    new_tokens: int = 96
    repetitions: int = 3
    gamma: int = 5
    corpus_mb: float = 4.0
    factor: int = 3
    staged_by: str = "lookup"


QUICK = Plan(prompts=1, new_tokens=16, repetitions=1, corpus_mb=0.1, factor=1)


@dataclass(frozen=True, slots=True)
class Part:
    """One text that every drafter writes."""

    kind: str
    text: str
    temperature: float
    repetition: int
    prompt: int


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)

    def told(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)

    base = QUICK if given.quick else Plan()
    asked = {name: getattr(given, name, None) for name in asdict(base)}
    plan = replace(base, **{name: value for name, value in asked.items() if value is not None})
    try:
        prompts = spread(read_prompts(given.prompts_file), plan.prompts)
        pairs = [Models("demo", given.target, given.draft)] if given.only != "deepened" else []
        if plan.factor > 1 and given.only != "demo":
            pairs.append(Models("deepened", cached(given.target, plan.factor, CACHE), given.draft))
        output = given.output or (CACHE / "drafters-quick.json" if given.quick else RESULTS / "drafters.json")
        record = Record.open(output, _head(plan, pairs, arguments), resume=given.resume)
    except (OSError, ValueError) as error:
        told(f"benchmarks.drafters: {error}")
        return 2
    for models in pairs:
        measure(models, plan, prompts, record, told)
    record.put("summary", summarise(record.runs))
    show(record.document, Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH))
    draw(record.document, record.path.with_suffix(".png"))
    print(json.dumps({key: value for key, value in record.document.items() if key != "runs"}, ensure_ascii=False))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = pair_parser("benchmarks.drafters", __doc__ or "", quick="few texts, the demo pair only")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--factor", type=int, help="how many times as deep the deepened target is; 1: leave it out")
    parser.add_argument("--prompts", type=int, help="how many prompts of each kind")
    parser.add_argument("--new-tokens", type=int, help="tokens of each text")
    parser.add_argument("--repetitions", type=int, help="how often each text is written by each drafter")
    parser.add_argument("--gamma", type=int, help="tokens of a proposal")
    parser.add_argument("--corpus-mb", type=float, help="MB of the training text that ngram counts")
    parser.add_argument("--staged-by", choices=("lookup", "ngram"), help="what guesses for the draft model in staged")
    return parser.parse_args(arguments)


def _head(plan: Plan, pairs: Sequence[Models], arguments: Sequence[str]) -> Json:
    return {
        "benchmark": "drafters",
        "command": machine.command("benchmarks.drafters", arguments),
        "machine": machine.describe(),
        "load_average_before": machine.load_average(),
        "settings": asdict(plan) | asdict(_HOW),
        "models": {models.name: models.document() for models in pairs},
    }


# ------------------------------------------------------------------------------------------------------------- one pair

_HOW = Processes(apart=True)


def measure(models: Models, plan: Plan, prompts: Sequence[str], record: Record, told: Told) -> None:
    """Writes all texts of one pair that the record does not hold yet."""
    left = [part for part in parts(plan, prompts) if not record.has_run(**_keys(models, part))]
    if not left:
        return
    with _corpus(plan.corpus_mb) as corpus:
        flags = ("--ngram-corpus", str(corpus), "--staged-by", plan.staged_by)
        with RunningPair(models.target, models.draft, _HOW, draft_flags=flags) as pair:
            for drafter in DRAFTERS:  # not measured
                write(pair, drafter, replace(left[0], temperature=1.0), plan)
            for turn, part in enumerate(left):
                first = turn % len(DRAFTERS)
                order = (*DRAFTERS[first:], *DRAFTERS[:first])
                runs = [
                    {**_keys(models, part), "drafter": drafter, **write(pair, drafter, part, plan)} for drafter in order
                ]
                record.add_runs(runs)
                speeds = ", ".join(f"{run['drafter']} {run['tokens'] / run['seconds']:.1f}" for run in runs)
                told(f"{models.name}, {part.kind}, T={part.temperature:g}, prompt {part.prompt + 1}: {speeds}")


def parts(plan: Plan, prompts: Sequence[str]) -> Iterator[Part]:
    """All that is written, in order: kinds and temperatures alternate, so that they too meet the same machine."""
    for repetition in range(plan.repetitions):
        for number, prompt in enumerate(prompts):
            for temperature in TEMPERATURES:
                for kind, text in kinds(prompt).items():
                    yield Part(kind, text, temperature, repetition, number)


def kinds(prompt: str) -> dict[str, str]:
    """Code to go on with, and the same code to be edited: it is there, and its beginning once more behind it."""
    lines = prompt.rstrip("\n").split("\n")
    beginning = "\n".join(lines[: max(1, len(lines) // 3)])
    return {"completion": prompt, "edit": f"{prompt}\n\n# Edited: the same, once more.\n{beginning}\n"}


def write(pair: RunningPair, drafter: str, part: Part, plan: Plan) -> Json:
    """One text, and what it took; of `staged` also how its inner game went."""
    inner = _inner(pair)
    begin = time.perf_counter()
    done = pair.client.complete(
        part.text,
        drafter=drafter,
        temperature=part.temperature,
        max_new_tokens=plan.new_tokens,
        ignore_eos=True,
        gamma=plan.gamma,
        rule=RULE,
        seed=1 + 1000 * part.repetition + part.prompt,
    )
    seconds = time.perf_counter() - begin
    task = Task(part.prompt, (), plan.new_tokens, part.temperature, 0)
    check_length(drafter, len(done.token_ids), task)
    told = done.statistics
    guessed, accepted = (after - before for after, before in zip(_inner(pair), inner, strict=True))
    return {
        "seconds": seconds,
        "tokens": len(done.token_ids),
        "rounds": told.num_rounds,
        "drafts": told.num_drafts,
        "drafted": told.num_draft_tokens,
        "accepted": told.num_accepted_tokens,
        "alpha": told.alpha if told.num_draft_tokens else None,
        "draft_failures": told.num_draft_failures,
        "inner_guessed": guessed,
        "inner_accepted": accepted,
        "digest": digest(done.token_ids),
        "phases": phases(done, seconds),
    }


def _inner(pair: RunningPair) -> tuple[int, int]:
    shown = pair.metrics_of(pair.draft)
    return int(shown["outrider_staged_guessed_tokens_total"]), int(shown["outrider_staged_accepted_tokens_total"])


def _keys(models: Models, part: Part) -> Json:
    return {
        "pair": models.name,
        "kind": part.kind,
        "temperature": f"{part.temperature:g}",
        "repetition": part.repetition,
        "prompt": part.prompt,
    }


@contextmanager
def _corpus(megabytes: float) -> Iterator[Path]:
    """A file with the beginning of the training text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        text = "\n".join(document.text for document in training_documents())
        path.write_text(text[: int(megabytes * 1e6)], encoding="utf-8")
        yield path


if __name__ == "__main__":
    sys.exit(main())
