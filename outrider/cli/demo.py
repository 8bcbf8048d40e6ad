"""`outrider demo`: both services as processes on this machine, one completion drawn, and what it cost.

It knows where the demo pair lies and what to measure; how services start and how tokens look is known elsewhere.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import click
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cli.drawing import TokenWriter
from outrider.cli.options import law_options, request_of, temperature_option
from outrider.cli.pair import Pair, PairSettings, running_pair
from outrider.cli.report import Failure, completion_document, fails_in_one_line, write_json
from outrider.client import Chunk, Client, Completion, Options, OutriderError
from outrider.client.results import Collector

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
# For a pair that brings no prompts of its own.
FALLBACK_PROMPT = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n'
HEALTH_TIMEOUT_S = 300.0
# Enough tokens for either to have run each of its steps.
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of writing the text came to; medians over the repeats."""

    tokens: int
    rounds: int
    alpha: float | None
    mean_acceptance_length: float | None
    tokens_per_second: float


@click.command("demo", short_help="See it work on the model pair in the repository.")
@click.argument("prompt", required=False)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to write at most."
)
@temperature_option("0")
@law_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Timed runs of each way; medians are shown.",
)
@click.option("--target", metavar="DIR_OR_ID", help="Another target. Default: the one in the repository.")
@click.option("--draft", metavar="DIR_OR_ID", help="Another draft. Default: the one in the repository.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="CPU threads of each service. Default: half of the processors."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object in place of drawing and table.")
@fails_in_one_line
def demo_command(
    prompt: str | None,
    max_new_tokens: int,
    repeats: int,
    target: str | None,
    draft: str | None,
    threads: int | None,
    as_json: bool,
    **values: Any,
) -> None:
    """See the pair at work: start both services here, let them continue PROMPT, and compare with the target alone.

    Every token is drawn by where it came from: drafted and accepted, drafted and rejected, or the target's own. Then
    the same prompt is timed with the draft and without, in turns. Both services end with the command.
    """
    settings = PairSettings(target or _demo_model("target"), draft or _demo_model("draft"), threads=threads)
    values["temperature"] = 0.0 if values["temperature"] is None else values["temperature"]
    options = request_of(values)
    options["max_new_tokens"] = max_new_tokens
    text = prompt if prompt is not None else _default_prompt()
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status("Starting the verifier (target) and the draft service") as status, running_pair(settings) as pair:
        pair.wait_healthy(HEALTH_TIMEOUT_S)
        status.stop()
        try:
            with Client(pair.address) as client:
                run = _Run(client, text, options)
                run.warm_up()
                shown = run.pair(report_rounds=True) if as_json else _draw(run, out, pair)
                status.update("Timing the pair and the target alone, in turns")
                status.start()
                document = _measure(run, shown, repeats)
                status.stop()
        except OutriderError:
            pair.check()  # a service that died says more than the call that met it
            raise
    if as_json:
        write_json({"prompt": text, **completion_document(shown), **document})
    else:
        _draw_table(out, document)


def _demo_model(name: str) -> str:
    folder = MODELS / name
    if not (folder / "config.json").is_file():
        raise Failure(
            f"the demo's {name} model is not at {folder}: it lies in the source tree. Run from a clone, or name a "
            "pair with --target and --draft"
        )
    return str(folder)


def _default_prompt() -> str:
    try:
        lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return FALLBACK_PROMPT
    entries = [json.loads(line) for line in lines if line.strip()]
    chosen = [entry for entry in entries if entry.get("default")] or entries
    return str(chosen[0]["prompt"]) if chosen else FALLBACK_PROMPT


@dataclass(slots=True)
class _Run:
    """One prompt and its options, with the draft and without."""

    client: Client
    prompt: str
    options: Options

    def warm_up(self) -> None:
        for gamma in (None, 0):
            self.client.complete(self.prompt, **self._with(gamma=gamma, max_new_tokens=_WARM_UP_TOKENS))

    def pair(self, *, report_rounds: bool = False) -> Completion:
        return self.client.complete(self.prompt, **self._with(report_rounds=report_rounds))

    def target_alone(self) -> Completion:
        return self.client.complete(self.prompt, **self._with(gamma=0))

    def draw(self, writer: TokenWriter) -> Completion:
        collector = Collector()
        for event in self.client.generate(self.prompt, **self._with(report_rounds=True)):
            collector.add(event)
            if isinstance(event, Chunk):
                writer.chunk(event)
        return collector.completion()

    def repeating(self, shown: Completion) -> _Run:
        """The same again: the seed and the rule that the service chose, fixed."""
        fixed = self._with(seed=shown.seed, rule=shown.started.rule)
        return replace(self, options=fixed)

    def _with(self, **changes: Any) -> Options:
        return cast(
            "Options", {**self.options, **{name: value for name, value in changes.items() if value is not None}}
        )


def _draw(run: _Run, out: Console, pair: Pair) -> Completion:
    models = run.client.get_model()
    for name, model, address in (
        ("target", models.target, pair.verifier.address),
        ("draft", models.model, pair.draft.address),
    ):
        out.print(f"{name:<7} {Path(model.name).name}, {model.dtype} on {model.device}, at {address}", style="dim")
    writer = TokenWriter(out)
    writer.legend()
    out.print()
    writer.prompt(run.prompt)
    completion = run.draw(writer)
    writer.end()
    return completion


def _measure(run: _Run, shown: Completion, repeats: int) -> dict[str, Any]:
    """Times both ways in turns, so that whatever else the machine does falls on both."""
    run = run.repeating(shown)
    pair_runs, alone_runs = [], []
    for _ in range(repeats):
        pair_runs.append(_timed(run.pair))
        alone_runs.append(_timed(run.target_alone))
    pair, alone = _cost(pair_runs), _cost(alone_runs)
    return {
        "pair": asdict(pair),
        "target_alone": asdict(replace(alone, alpha=None, mean_acceptance_length=None)),
        "ratio": pair.tokens_per_second / alone.tokens_per_second,
        "repeats": repeats,
        "same_tokens": all(done.token_ids == shown.token_ids for done, _ in (*pair_runs, *alone_runs)),
    }


def _timed(work: Callable[[], Completion]) -> tuple[Completion, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def _cost(runs: list[tuple[Completion, float]]) -> Cost:
    last = runs[-1][0]
    return Cost(
        tokens=last.usage.completion_tokens,
        rounds=last.statistics.num_rounds,
        alpha=last.statistics.alpha,
        mean_acceptance_length=last.statistics.mean_acceptance_length,
        tokens_per_second=statistics.median(done.usage.completion_tokens / seconds for done, seconds in runs),
    )


def _draw_table(out: Console, document: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD if out.is_terminal else box.ASCII2, pad_edge=False)
    table.add_column("")
    for heading in ("tokens", "rounds", "α", "mean acceptance length", "tokens/s", "ratio"):
        table.add_column(heading, justify="right")
    for name, key, ratio in (("draft + target", "pair", document["ratio"]), ("target alone", "target_alone", 1.0)):
        cost = Cost(**document[key])
        table.add_row(
            name,
            str(cost.tokens),
            str(cost.rounds),
            _number(cost.alpha),
            _number(cost.mean_acceptance_length),
            f"{cost.tokens_per_second:.1f}",
            f"{ratio:.2f}",
        )
    out.print()
    out.print(table)
    if document["same_tokens"]:
        out.print("Both wrote the same tokens.")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
