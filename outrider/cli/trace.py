"""`outrider trace`: the timeline of one request, with speculation and without."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from outrider.cli.demo import warn_of_busy_processors
from outrider.cli.options import (
    POSITIVE,
    RETRY_TIMEOUT_S,
    calling_options,
    connected,
    draft_option,
    request_of,
    sampling_options,
    temperature_option,
    timeout_option,
)
from outrider.cli.output import (
    check_folder,
    check_picture,
    completion_document,
    print_table,
    table,
    warn_of_loss,
    write_json,
    writing,
)
from outrider.client import AcceptanceRule, Completion, Drafter
from outrider.environment import installed_version
from outrider.evaluation.clips import refuse_speech
from outrider.evaluation.trace import Traced, chrome_trace, draw, record

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("trace", short_help="The timeline of one request, with speculation and without.")
@click.argument("prompt")
@draft_option(several=False)
@click.option(
    "--output",
    metavar="FILE",
    type=_FILE,
    default=Path("trace.json"),
    help="Trace to write, for Perfetto (ui.perfetto.dev) or chrome://tracing.",
)
@click.option("--picture", metavar="FILE", type=_FILE, help="Picture to write too; its name ends in .svg or .png.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, help="Maximum tokens of the text.")
@timeout_option("Time after which a text fails.", kind=POSITIVE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@calling_options
@temperature_option("0")
@sampling_options
def trace_command(
    prompt: str, draft: str, output: Path, picture: Path | None, timeout: float, as_json: bool, **values: Any
) -> None:
    """Continue PROMPT twice, with speculation and by the target alone, and write where the time went; `-` reads the
    prompt from standard input.

    Rows are drafting, the wire between the services, the verifier's queue, target passes and verification. The times
    are the services' own, on one clock. Above temperature 0 a seed is drawn if neither --seed nor --rule is given, so
    that both texts are the same.

    \b
    outrider trace --picture trace.svg "def mean(values):"
    outrider trace --draft 10.0.0.7:50051 --gamma 7 --output mine.json - < prompt.txt
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    if values["gamma"] == 0:
        raise click.UsageError("--gamma is 0: the target alone, which trace measures in any case; give at least 1")
    check_folder("--output", output)
    if picture is not None:
        check_picture(picture)
    text = sys.stdin.read() if prompt == "-" else prompt
    with connected(draft, timeout, RETRY_TIMEOUT_S, values) as client:
        options = request_of(values)
        options.setdefault("temperature", 0.0)
        refuse_speech(client.get_model().target, "trace")
        warn_of_busy_processors(draft)
        with Console(stderr=True).status("Writing the text with speculation and by the target alone"):
            runs = record(client.complete, text, options)
    about = {
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "outrider": installed_version(),
        "clock": "half of each round's time on the wire counts before the queue, half after verification",
    }
    with writing("--output", output):
        output.write_text(json.dumps(chrome_trace(runs, about), ensure_ascii=False) + "\n", encoding="utf-8")
    if picture is not None:
        with writing("--picture", picture):
            draw(picture, runs)
    if as_json:
        write_json({"prompt": text, "runs": [_document(run) for run in runs]})
    else:
        warn_of_loss(runs[0].completion.started)
        same = options["temperature"] == 0 or runs[0].completion.rule is AcceptanceRule.COUPLED
        _print(Console(highlight=False), runs, same=same, is_fixed=values["gamma"] is not None)
        click.echo(f"Trace: {output}; open it at https://ui.perfetto.dev or in chrome://tracing")
        if picture is not None:
            click.echo(f"Picture: {picture}")


def _document(run: Traced) -> dict[str, Any]:
    names = ("name", "seconds", "tokens_per_second", "phases_us")
    return {name: getattr(run, name) for name in names} | completion_document(run.completion)


def _print(out: Console, runs: tuple[Traced, ...], *, same: bool, is_fixed: bool) -> None:
    """Prints the sums of both runs. `same` is whether their texts are promised to be; `is_fixed` is of γ."""
    times = table("", *(run.name for run in runs))
    for row in runs[0].phases_us:
        times.add_row(f"{row} (ms)", *(f"{run.phases_us[row] / 1e3:.1f}" for run in runs))
    times.add_row("rest (ms)", *(f"{run.rest_us / 1e3:.1f}" for run in runs))
    times.add_row("whole request (ms)", *(f"{run.seconds * 1e3:.1f}" for run in runs))
    times.add_row("tokens", *(str(run.completion.usage.completion_tokens) for run in runs))
    times.add_row("target passes", *(str(run.target_passes) for run in runs))
    times.add_row("tokens/s", *(f"{run.tokens_per_second:.1f}" for run in runs))
    print_table(out, times)
    out.print()
    drafted, alone = (run.completion for run in runs)
    if not drafted.statistics.num_drafts:
        reason = _why_nothing_was_drafted(drafted, is_fixed=is_fixed)
        out.print(f"Nothing was drafted, so both columns are the target alone: {reason}.", soft_wrap=True)
    if drafted.token_ids == alone.token_ids:
        out.print("Both texts are the same.")
    elif same:
        out.print("The texts differ: two tokens were almost equally probable, and rounding decided.", soft_wrap=True)
    else:
        out.print(
            f"The texts differ: under the rule {drafted.rule} they depend on gamma; leave out --rule for one text.",
            soft_wrap=True,
        )


def _why_nothing_was_drafted(completion: Completion, *, is_fixed: bool) -> str:
    if completion.usage.completion_tokens == 1:
        return "a text of one token needs no draft"
    if completion.drafter is Drafter.NONE:
        return "the drafter is none; name another one with --drafter"
    if is_fixed:
        return f"the drafter {completion.drafter} proposed no token"
    return "drafting did not pay; --gamma 4 fixes gamma"
