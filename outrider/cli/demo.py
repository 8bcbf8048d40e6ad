"""`outrider demo`: both services as processes on this machine, one completion drawn, and what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cli.comparison import Comparison, Subject
from outrider.cli.drawing import TokenWriter
from outrider.cli.options import device_options, law_options, request_of, temperature_option
from outrider.cli.pair import Pair, PairSettings, running_pair, terminated_as_interrupted
from outrider.cli.report import Failure, completion_document, fails_in_one_line, warn_of_loss, write_json
from outrider.client import AcceptanceRule, Chunk, Client, Unavailable
from outrider.client.results import Collector

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
# Where the models come without `prompts.jsonl`, whose first prompt is the demo's.
FALLBACK_PROMPT = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n'
HEALTH_TIMEOUT_S = 300.0
# A large process takes a moment to be gone after its connections are.
_DEATH_S = 3.0


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
@device_options
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
    device: str | None,
    target_device: str | None,
    draft_device: str | None,
    threads: int | None,
    as_json: bool,
    **values: Any,
) -> None:
    """See the pair at work: start both services here, let them continue PROMPT, and compare with the target alone.

    Every token is drawn by where it came from: drafted and accepted, drafted and rejected, or the target's own. Then
    the same prompt is timed with the draft and without, in turns. Both services end with the command.
    """
    settings = PairSettings(
        target or _demo_model("target"),
        draft or _demo_model("draft"),
        device=device,
        target_device=target_device,
        draft_device=draft_device,
        threads=threads,
    )
    values["temperature"] = 0.0 if values["temperature"] is None else values["temperature"]
    options = request_of(values)
    options["max_new_tokens"] = max_new_tokens
    text = prompt if prompt is not None else _default_prompt()
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with (
        terminated_as_interrupted(),
        err.status("Starting the verifier service (target) and the draft service") as status,
        running_pair(settings) as pair,
    ):
        pair.wait_healthy(HEALTH_TIMEOUT_S)
        status.stop()
        try:
            with Client(pair.address) as client:
                subject = Subject(client, text, options)
                subject.warm_up()
                collector = Collector()
                writer = None if as_json else _begin_drawing(out, pair, client, text)
                for event in subject.stream():
                    collector.add(event)
                    if writer is not None and isinstance(event, Chunk):
                        writer.chunk(event)
                shown = collector.completion()
                if writer is not None:
                    writer.end()
                status.update("Timing the pair and the target alone, in turns")
                status.start()
                comparison = subject.compare(shown, repeats)
                status.stop()
        except Unavailable:
            # A service that died says more than the call that met it, which may well be known first.
            pair.check(within=_DEATH_S)
            raise
    if as_json:
        write_json({"prompt": text, **completion_document(shown), **asdict(comparison)})
    else:
        promised = options.get("temperature") == 0 or shown.started.rule is AcceptanceRule.COUPLED
        draw_comparison(out, comparison, promised=promised)
        warn_of_loss(shown.started)


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
        first = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return FALLBACK_PROMPT
    return str(json.loads(first)["text"])


def _begin_drawing(out: Console, pair: Pair, client: Client, prompt: str) -> TokenWriter:
    models = client.get_model()
    for name, model, address in (
        ("target", models.target, pair.verifier.address),
        ("draft", models.model, pair.draft.address),
    ):
        out.print(f"{name:<7} {_short(model.name)}, {model.dtype} on {model.device}, at {address}", soft_wrap=True)
    writer = TokenWriter(out)
    writer.legend()
    out.print()
    writer.prompt(prompt)
    return writer


def _short(name: str) -> str:
    """A folder below this one without the way to here."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


def draw_comparison(out: Console, comparison: Comparison, *, promised: bool) -> None:
    """Draws the two ways as a table of 76 columns, and says whether their texts are equal, where that is promised."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("tokens", "rounds", "α", "mean acceptance\nlength", "tokens/s", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cost, ratio in (
        ("draft + target", comparison.pair, comparison.ratio),
        ("target alone", comparison.target_alone, 1.0),
    ):
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
    out.print()
    if comparison.first_difference is None:
        out.print("Both wrote the same text, token for token.")
    elif promised:
        out.print(f"The texts part at token {comparison.first_difference + 1}: a near-tie that rounding decided.")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
