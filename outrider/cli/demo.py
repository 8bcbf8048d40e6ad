"""`outrider demo`: runs both services on this machine, draws one completion, and compares with the target alone."""

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.style import Style
from rich.text import Text

from outrider.cli.options import flags_of_pair, model_options, request_of, sampling_options, temperature_option
from outrider.cli.output import (
    Failure,
    completion_document,
    print_table,
    table,
    warn_of_loss,
    write_json,
)
from outrider.cli.processes import Pair, busy_processors, processors, running_pair, terminated_as_interrupted
from outrider.client import AcceptanceRule, Chunk, Client, Completion, Event, TokenOrigin, Unavailable
from outrider.client.texts import parts_of_tokens
from outrider.evaluation.streams import target_passes
from outrider.rpc.channel import is_local
from outrider.rpc.errors import counted

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
# Used if the models have no `prompts.jsonl`; else its first prompt is used.
FALLBACK_PROMPT = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n'
HEALTH_TIMEOUT_S = 300.0
# A large process ends some time after its connections.
_DEATH_S = 3.0
# Share of the processors that other processes may use before the demo warns.
_BUSY_SHARE = 0.15
# Enough tokens for either mode to have run each kind of step.
_WARM_UP_TOKENS = 16


@click.command("demo", short_help="See it work on the model pair in the repository.")
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, help="Maximum tokens to generate.")
@temperature_option("0")
@sampling_options
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, help="Timed runs with the draft, and as many without."
)
@click.option("--target", metavar="DIR_OR_ID", help="Another target. Default: the one in the repository.")
@click.option("--draft", metavar="DIR_OR_ID", help="Another draft. Default: the one in the repository.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo_command(prompt: str | None, max_new_tokens: int, repeats: int, as_json: bool, **values: Any) -> None:
    """Start both services on this machine, continue PROMPT, and compare with the target alone.

    The style of a token shows its origin: drafted and accepted, drafted and rejected, or the target's own. Then the
    command measures the speed with the draft and without.
    """
    how = {name: values.pop(name) for name in ("target", "draft", "device", "target_device", "draft_device", "threads")}
    how["listen"] = "127.0.0.1:0"  # a draft service may run at the default address
    for role in ("target", "draft"):
        how[role] = how[role] or demo_model(role)
    options = request_of(values)
    options.setdefault("temperature", 0.0)
    options["max_new_tokens"] = max_new_tokens
    text = prompt if prompt is not None else _default_prompt()
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    warn_of_busy_processors(how["listen"])
    with (
        terminated_as_interrupted(),
        err.status("Starting the verifier service (target) and the draft service") as status,
        running_pair(*flags_of_pair(how), threads=how["threads"]) as pair,
    ):
        pair.wait_healthy(HEALTH_TIMEOUT_S)
        status.stop()
        try:
            with Client(pair.address) as client:
                complete: Complete = partial(client.complete, text, **options)
                for changes in ({}, {"gamma": 0}):  # warm-up of both modes
                    complete(max_new_tokens=_WARM_UP_TOKENS, **changes)
                writer = None if as_json else _begin_drawing(out, pair, client, text)
                events: list[Event] = []
                for event in client.generate(text, **options | {"report_rounds": True}):
                    events.append(event)
                    if writer is not None and isinstance(event, Chunk):
                        writer.chunk(event)
                shown = Completion.of(events)
                if writer is not None:
                    writer.end()
                status.update("Timing the pair and the target alone, in turns")
                status.start()
                comparison = compare(complete, shown, repeats)
                status.stop()
        except Unavailable:
            # A service that died has the reason; the failed call may be seen first.
            pair.check(within=_DEATH_S)
            raise
    if as_json:
        write_json({"prompt": text, **completion_document(shown), **asdict(comparison)})
    else:
        promised = options.get("temperature") == 0 or shown.rule is AcceptanceRule.COUPLED
        draw_comparison(out, comparison, shown, promised=promised)
        warn_of_loss(shown.started)


def warn_of_busy_processors(addresses: str) -> None:
    """Warns on stderr if the services are on this machine and other processes use it: times are then not comparable."""
    if not all(map(is_local, addresses.split(","))):
        return
    busy, count = busy_processors(), len(processors())
    if busy > _BUSY_SHARE * count:
        click.echo(
            f"outrider: other processes use {busy:.1f} of {counted(count, 'processor')}: speeds and their ratios are "
            "unreliable; try again when the machine is idle",
            err=True,
        )


def demo_model(name: str) -> str:
    """The folder of the demo's `target` or `draft`.

    Raises:
        Failure: it is not there.
    """
    folder = MODELS / name
    if not (folder / "config.json").is_file():
        raise Failure(
            f"the demo's {name} model is not at {folder}, since it comes with the source: run the demo in a clone of "
            "Outrider, or name another pair with --target and --draft"
        )
    return str(folder)


def _default_prompt() -> str:
    try:
        first = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return FALLBACK_PROMPT
    return str(json.loads(first)["text"])


def _begin_drawing(out: Console, pair: Pair, client: Client, prompt: str) -> "TokenWriter":
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
    """A folder, relative to the current folder if it is inside."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


# --------------------------------------------------------------------------------------------------------- comparing

Complete = Callable[..., Completion]
"""Generates the text once; its arguments replace options of the request."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens, passes of the target and speed of one mode: with the draft, or the target alone.

    `alpha` and `mean_acceptance_length` are None if nothing was drafted. `tokens_per_second` is by the client's
    clock, prompt and wire included, and the median of the repeats.
    """

    tokens: int
    passes: int
    alpha: float | None
    mean_acceptance_length: float | None
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both modes. `first_difference` is the first position where two texts differ, or None."""

    pair: Cost
    target_alone: Cost
    ratio: float
    repeats: int
    first_difference: int | None


def compare(complete: Complete, shown: Completion, repeats: int) -> Comparison:
    """Times both modes in turns, so that other load on the machine affects both. Seed and rule are those of `shown`."""
    pair, alone = [], []
    for _ in range(repeats):
        pair.append(_timed(lambda: complete(seed=shown.seed, rule=shown.rule)))
        alone.append(_timed(lambda: complete(seed=shown.seed, rule=shown.rule, gamma=0)))
    texts = [shown.token_ids, *(done.token_ids for done, _ in (*pair, *alone))]
    with_draft, without = _cost(pair), _cost(alone)
    return Comparison(
        pair=with_draft,
        target_alone=without,
        ratio=with_draft.tokens_per_second / without.tokens_per_second,
        repeats=repeats,
        first_difference=next((at for at, tokens in enumerate(zip_longest(*texts)) if len(set(tokens)) > 1), None),
    )


def _timed(work: Callable[[], Completion]) -> tuple[Completion, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def _cost(runs: list[tuple[Completion, float]]) -> Cost:
    last = runs[-1][0]
    drafted = last.statistics.num_drafts > 0
    return Cost(
        tokens=last.usage.completion_tokens,
        passes=target_passes(last.statistics, last.usage.completion_tokens),
        alpha=last.statistics.alpha or None,  # 0: nothing was drafted
        mean_acceptance_length=last.statistics.mean_acceptance_length if drafted else None,
        tokens_per_second=statistics.median(done.usage.completion_tokens / seconds for done, seconds in runs),
    )


def draw_comparison(out: Console, comparison: Comparison, shown: Completion, *, promised: bool) -> None:
    """Draws both modes as a table of 76 columns, and whether their texts are equal, if `promised`."""
    modes = table("", "tokens", "passes", "α", "mean acceptance\nlength", "tokens/s", "ratio")
    for name, cost, ratio in (
        ("draft + target", comparison.pair, comparison.ratio),
        ("target alone", comparison.target_alone, 1.0),
    ):
        known = ("–" if each is None else f"{each:.2f}" for each in (cost.alpha, cost.mean_acceptance_length))
        rate = f"{cost.tokens_per_second:.1f}"
        modes.add_row(name, str(cost.tokens), str(cost.passes), *known, rate, f"{ratio:.2f}")
    out.print()
    print_table(out, modes)
    out.print()
    if comparison.pair.mean_acceptance_length is None:
        out.print("The last timed run drafted nothing: drafting was slower, or --gamma or --drafter turns it off.")
        if (drafted := shown.statistics).num_drafts:
            length = drafted.mean_acceptance_length
            out.print(f"The text above was drafted: α {drafted.alpha:.2f}, mean acceptance length {length:.2f}.")
    if comparison.first_difference is None:
        out.print("Both wrote the same text, token for token.")
    elif promised:
        out.print(
            f"The texts differ from token {comparison.first_difference + 1} on: two tokens were almost equally "
            "probable there, and rounding decided."
        )


# ----------------------------------------------------------------------------------------------------------- drawing

# In colour: accepted draft tokens green, the rejected one of a round red and struck, the target's own blue, as in
# [L Figure 1]. Without colour: accepted ones plain, `[-rejected-]`, `{+the target's own+}`.
_ACCEPTED = Style(color="green")
_REJECTED = Style(color="red", strike=True)
_TARGET = Style(color="blue", bold=True)
_PROMPT = Style(dim=True)


class TokenWriter:
    """Writes the chunks of one sample to a console. They must have `rounds`."""

    def __init__(self, console: Console):
        self._console = console
        self._colour = console.color_system is not None and not console.no_color
        self._length = 0
        self._held: deque[tuple[str, TokenOrigin]] = deque()  # tokens without delivered text
        # The first rejected token of a round, by the output position it would have had.
        self._rejected: dict[int, str] = {}

    def legend(self) -> None:
        accepted, rejected = self._accepted("accepted draft tokens"), self._struck("rejected draft token")
        line = Text.assemble(accepted, "  ", rejected, "  ", self._own("the target's own token"))
        self._console.print(line, soft_wrap=True)

    def prompt(self, text: str) -> None:
        self._write(Text(text, _PROMPT if self._colour else ""))

    def chunk(self, chunk: Chunk) -> None:
        for report in chunk.rounds:
            if report.accepted < len(report.drafted_texts):
                self._rejected[report.output_length + report.accepted] = report.drafted_texts[report.accepted]
        self._held.extend(zip(chunk.token_texts, chunk.origins, strict=True))
        whole = [self._held.popleft() for _ in range(len(self._held) - chunk.held_tokens)]
        line = Text()
        for text, (_, origin) in zip(parts_of_tokens(chunk.text, [each for each, _ in whole]), whole, strict=True):
            rejected = self._rejected.pop(self._length, None)
            if rejected is not None:
                line.append(self._struck(rejected.replace("\n", "↵").replace("\t", "⇥")))
            # The end of a line would be invisible.
            own = self._own(text.replace("\n", "↵\n", 1))
            line.append(self._accepted(text) if origin is TokenOrigin.DRAFT else own)
            self._length += 1
        self._write(line)

    def end(self) -> None:
        self._console.print()

    def _write(self, line: Text) -> None:
        self._console.print(line, end="", soft_wrap=True)
        self._console.file.flush()

    def _accepted(self, text: str) -> Text:
        return Text(text, _ACCEPTED if self._colour else "")

    def _struck(self, text: str) -> Text:
        return Text(text, _REJECTED) if self._colour else Text(f"[-{text}-]" if text else "")

    def _own(self, text: str) -> Text:
        if self._colour:
            return Text(text if text.strip(" ") else "·" * len(text), _TARGET)  # a space has no colour
        # The mark closes before the end of the line.
        head, newline, tail = text.partition("\n")
        return Text(f"{{+{head}+}}{newline}{tail}" if text else "")
