"""`outrider plan`: the best γ of a pair, its speed-up and operations, and where drafting does not pay."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from outrider.cli.bench import read_prompts
from outrider.cli.demo import warn_of_busy_processors
from outrider.cli.options import (
    DRAFTERS,
    RETRY_TIMEOUT_S,
    Address,
    FloatRange,
    Numbers,
    calling_options,
    connected,
    prompts_file_option,
    request_of,
    temperature_option,
    timeout_option,
)
from outrider.cli.output import Failure, check_picture, print_table, table, write_json, writing
from outrider.cli.progress import progress
from outrider.client import Prompt
from outrider.evaluation.clips import refuse_speech
from outrider.evaluation.deployment import PROMPTS
from outrider.evaluation.plan import MAX_GAMMA, Measurement, Pair, Plan, SpeedUp, extended, make_plan, measure
from outrider.rpc.errors import counted

MOST_PROMPTS = 8
"""Of a file, evenly spread over it, in a measurement."""


_MOST = 1e6
"""The largest time, in target steps or milliseconds: sums and products stay finite."""


class Steps(click.ParamType[tuple[float, bool]]):
    """A time in target steps (0.1) or in milliseconds (2.5ms): the number, and whether it is of milliseconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, bool]:
        text = str(value)
        try:
            number = float(text.removesuffix("ms"))
        except ValueError:
            number = -1.0
        if not 0 <= number <= _MOST:
            self.fail(
                f"{value!r} is not a time from 0 to {_MOST:,.0f}, in target steps (0.1) or milliseconds (2.5ms)",
                param,
                ctx,
            )
        return number, text.endswith("ms")


@click.command("plan", short_help="The best gamma of a pair, and where drafting does not pay.")
@click.option(
    "--alpha",
    type=Numbers(FloatRange(0, 1), name="A[,A...]", in_order=True),
    help="Chance that a drafted token is accepted; several: by position. Positions after the last one have the mean of "
    "the last four.",
)
@click.option("--c", type=Steps(), help="Time of a draft step, in target steps, or with ms: 2ms.")
@click.option("--round-trip", type=Steps(), help="Time of a round outside draft and target, as --c. Default: 0.")
@click.option("--target-step", metavar="MS", type=FloatRange(1e-6, _MOST), help="Time of a target step, in ms.")
@click.option(
    "--token-cost",
    metavar="STEPS",
    type=FloatRange(0, _MOST),
    help="Growth of the target's pass with each further token, in target steps. Default: 0.",
)
@click.option(
    "--c-hat",
    metavar="RATIO",
    type=FloatRange(0, _MOST),
    help="Operations of the draft per token, over the target's. Default: --c.",
)
@click.option(
    "--hit-rate",
    metavar="SHARE",
    type=FloatRange(0, 1),
    help="Share of drafting that the outcome cache saves. Default: 0.",
)
@click.option("--parallel", is_flag=True, help="One draft step drafts all tokens.")
@click.option("--max-gamma", type=click.IntRange(1, 64), help=f"Largest gamma. Default: {MAX_GAMMA}.")
@click.option(
    "--draft",
    type=Address(several=True),
    help="Measure the pair of this draft service; values above replace measured ones.",
)
@prompts_file_option("built-in ones", "With --draft: prompts, ")
@click.option("--max-new-tokens", type=click.IntRange(16), default=64, help="With --draft: tokens of each text.")
@temperature_option("1")
@click.option("--top-k", type=int, help="With --draft: keep the K most probable tokens. Default: 0, all.")
@click.option("--top-p", type=float, help="With --draft: keep the most probable tokens of this mass. Default: 1.")
@click.option(
    "--drafter", type=click.Choice(DRAFTERS), help="With --draft: source of proposed tokens. Default: the service's."
)
@timeout_option("With --draft: time after which a call fails.")
@calling_options
@click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the paper's figures with this pair in them: .png or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(draft: str | None, picture: Path | None, as_json: bool, **values: Any) -> None:
    """Find the best gamma of a pair, its speed-up, and where drafting does not pay.

    The pair is given by --alpha and --c, or measured with --draft: a few texts, by the target alone and with gammas 2
    and --max-gamma. A target step is the time in which the target alone writes a token. Use an idle machine.

    \b
    outrider plan --alpha 0.8 --c 0.05 --round-trip 0.1
    outrider plan --alpha 0.8 --c 2ms --round-trip 1.5ms --target-step 25
    outrider plan --draft 127.0.0.1:50051 --temperature 0 --picture plan.png
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    given = {name: values.pop(name) for name in _GIVEN}
    if picture is not None:
        check_picture(picture)
    if draft is None:
        _refuse_options_of_a_measurement()
        measurement, num_prompts = None, 0
    else:
        measurement, num_prompts = _measured(draft, given["max_gamma"], values)
    pair = _pair(given, None if measurement is None else measurement.pair)
    try:
        plan = make_plan(pair)
    except ValueError as error:  # times that are infinite together
        raise Failure(str(error)) from error
    if as_json:
        write_json(_document(plan, measurement))
    else:
        _print(Console(highlight=False), plan, measurement, num_prompts)
    if picture is not None:
        from outrider.evaluation.figures import draw_plan  # imports matplotlib

        with writing("--picture", picture):
            draw_plan(picture, plan)


# -------------------------------------------------------------------------------------------------------------- pairs

_GIVEN = (
    "alpha", "c", "round_trip", "target_step", "token_cost", "c_hat", "hit_rate", "parallel", "max_gamma",
)  # fmt: skip


def _refuse_options_of_a_measurement() -> None:
    context = click.get_current_context()
    for option in context.command.params:
        is_given = context.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT
        if is_given and option.name not in (*_GIVEN, "draft", "picture", "as_json"):
            raise click.UsageError(f"{option.opts[0]} needs --draft")


def _pair(given: Mapping[str, Any], measured: Pair | None) -> Pair:
    """The measured pair with the given values in the place of its own, or a pair of the given values alone.

    Raises:
        UsageError: a value is missing.
    """
    step_ms = given["target_step"]
    if measured is not None and measured.step_ms is not None:
        pair = measured
        if step_ms is not None:  # another target: its draft and the network take the same milliseconds
            share = measured.step_ms / step_ms
            pair = replace(pair, c=pair.c * share, round_trip=pair.round_trip * share)
    elif given["alpha"] is None or given["c"] is None:
        raise click.UsageError("give --alpha and --c, or --draft HOST:PORT to measure them")
    else:
        pair = Pair(0.0, 0.0)
    step_ms = pair.step_ms if step_ms is None else step_ms
    changes = {name: given[name] for name in ("token_cost", "c_hat", "hit_rate", "max_gamma")}
    changes |= {name: _steps(name, given[name], step_ms) for name in ("c", "round_trip")}
    changes |= {"parallel": given["parallel"], "step_ms": step_ms}
    if given["alpha"] is not None:
        changes |= _alphas(given["alpha"], given["max_gamma"] or pair.max_gamma)
    return replace(pair, **{name: value for name, value in changes.items() if value is not None})


def _alphas(alphas: Sequence[float], max_gamma: int) -> dict[str, Any]:
    """One α, or α by position and its mean: each position has the weight with which it is judged."""
    if len(alphas) == 1:
        return {"alpha": alphas[0], "by_position": ()}
    judged = [1.0, *accumulate(alphas[:-1], mul)]
    mean = sum(map(mul, judged, alphas)) / sum(judged)
    return {"alpha": mean, "by_position": extended(alphas, max_gamma)}


def _steps(name: str, time: tuple[float, bool] | None, step_ms: float | None) -> float | None:
    if time is None:
        return None
    number, is_ms = time
    if not is_ms:
        return number
    if step_ms is None:
        raise click.UsageError(
            f"--{name.replace('_', '-')} is {number:g} ms; give --target-step MS too, or the time in target steps"
        )
    return number / step_ms


def _measured(draft: str, max_gamma: int | None, values: dict[str, Any]) -> tuple[Measurement, int]:
    """The pair, and the number of prompts that were given."""
    file = values.pop("prompts_file")
    given: Sequence[Prompt] = PROMPTS if file is None else read_prompts(file)
    prompts = given[:: -(-len(given) // MOST_PROMPTS)]
    warn_of_busy_processors(draft)
    with (
        connected(draft, values.pop("timeout"), RETRY_TIMEOUT_S, values) as client,
        progress("texts", with_lines=False) as update,
    ):
        update("Measuring", 0, 0)
        pair = client.get_model()
        refuse_speech(pair.target, "plan")
        limit = pair.model.limits.max_gamma
        if max_gamma is not None and max_gamma > limit:
            raise Failure(f"--max-gamma is {max_gamma}; the draft service allows at most {limit}")
        options = request_of(values | {"ignore_eos": True})
        found = measure(
            partial(client.complete, **options),
            prompts,
            max_gamma=max_gamma or min(limit, MAX_GAMMA),
            report=partial(update, "Measuring"),
        )
    return found, len(given)


# ------------------------------------------------------------------------------------------------------------- output


def _document(plan: Plan, measurement: Measurement | None) -> dict[str, Any]:
    document = asdict(plan)
    document["fastest"] = asdict(plan.fastest)
    rates = plan.tokens_per_second
    document["tokens_per_second"] = None if rates is None else dict(zip(("pair", "target_alone"), rates, strict=True))
    if measurement is not None:
        document["measured"] = asdict(measurement)
    return document


# Of a plan with more: these, the best γ and the measured ones.
_SHOWN_GAMMAS = (*range(1, MAX_GAMMA + 1), 24, 32, 48, 64)


def _print(out: Console, plan: Plan, measurement: Measurement | None, num_prompts: int) -> None:
    speed_ups = {} if measurement is None else measurement.speed_ups
    if measurement is not None:
        _print_lines(out, _of_measurement(measurement, num_prompts))
        out.print()
    names = ("γ", "tokens a round", "speed-up", "operations", *(["measured speed-up"] if speed_ups else []))
    rows = table(*names, left=0, no_wrap=False)
    for row in plan.rows:
        if row.gamma in (*_SHOWN_GAMMAS, plan.fastest.gamma, *speed_ups):
            cells = [str(row.gamma), *(f"{value:.2f}" for value in (row.tokens, row.speed_up, row.operations))]
            if row.gamma in speed_ups:
                cells.append(_spread(speed_ups[row.gamma]))
            rows.add_row(*cells, style="bold" if row.gamma == plan.gamma else "")
    print_table(out, rows)
    out.print()
    _print_lines(out, _of_plan(plan, measurement))
    if plan.of_streams:
        out.print()
        names = ("streams in each pass", "best γ", "speed-up over the target alone with as many")
        rows = table(*names, left=0, no_wrap=False)
        for each in plan.of_streams:
            rows.add_row(str(each.streams), str(each.gamma), f"{each.speed_up:.2f}")
            if not each.gamma:
                break  # with more streams it pays less
        print_table(out, rows)


def _print_lines(out: Console, lines: Iterable[tuple[str, str]]) -> None:
    """Prints names and texts as two columns. A long line is not wrapped where the output is a pipe."""
    found = list(lines)
    if out.is_terminal:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for line in found:
            grid.add_row(*line)
        out.print(grid)
        return
    width = max(len(name) for name, _ in found)
    for name, text in found:
        out.print(f"{name:<{width}}  {text}", soft_wrap=True)


def _spread(found: SpeedUp) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _of_measurement(measurement: Measurement, num_prompts: int) -> Iterator[tuple[str, str]]:
    pair = measurement.pair
    step = pair.step_ms or 0.0
    between = "" if measurement.interval is None else " ({:.3f} to {:.3f} with 95 %)".format(*measurement.interval)
    prompts = f"{measurement.prompts} of {counted(num_prompts, 'prompt')}"
    yield "α", f"{pair.alpha:.3f}{between}, the mean of {measurement.judged} judged tokens after {prompts}"
    yield "by position", " ".join(f"{alpha:.2f}" for alpha in pair.by_position[: max(measurement.speed_ups)])
    if pair.share < 1:
        yield "rounds with a draft", f"{pair.share:.0%}"
    yield "target step", f"{step:.2f} ms"
    yield "draft step", f"{pair.c * step:.2f} ms: c = {pair.c:.3f}"
    yield "rest of a round", f"{pair.round_trip * step:.2f} ms: R = {pair.round_trip:.3f} target steps"
    yield "target pass", f"{pair.token_cost:.1%} of a step longer with each further token"
    yield "outcome cache", f"saves {pair.hit_rate:.0%} of drafting"


def _of_plan(plan: Plan, measurement: Measurement | None) -> Iterator[tuple[str, str]]:
    fastest, rates = plan.fastest, plan.tokens_per_second
    speed = f"{fastest.speed_up:.2f} times as fast as the target alone"
    if rates is not None:
        speed += f" ({rates[0]:.0f} tokens/s, not {rates[1]:.0f})"
    if plan.gamma:
        yield "best γ", f"{plan.gamma}: {speed}"
    else:
        yield "best γ", f"0: drafting does not pay; γ = {fastest.gamma} is {speed}"
    if measurement is not None:
        nearest = min(measurement.speed_ups, key=lambda gamma: abs(gamma - fastest.gamma))
        if (found := measurement.speed_ups[nearest]).is_unclear:
            yield "measured", f"γ = {nearest} has {_spread(found)} by prompt: it may not pay, on some prompts or at all"
    operations = f"{fastest.operations:.2f} times those of the target alone"
    yield "operations", operations + (", if ĉ = c (--c-hat)" if plan.pair.c_hat is None else "")
    if plan.lower_bound is not None and plan.oracle is not None:
        hindsight = f"{plan.oracle:.2f} with the best γ of each round in hindsight"
        yield "limits", f"{plan.lower_bound:.2f} with γ = 1; {hindsight}"
    busy = f"busy {plan.target_share:.0%} of the time with one stream (its draft {plan.draft_share:.0%})"
    yield "one target", f"{busy}; without batching it feeds {plan.drafts:.1f} drafts of one stream each"
    yield "drafting pays", "; ".join(_where_it_pays(plan))


def _where_it_pays(plan: Plan) -> Iterator[str]:
    if plan.least_alpha is not None:
        yield f"above α = {plan.least_alpha:.2f}{' at all positions' if plan.pair.by_position else ''}"
    else:
        yield "at no α"
    if plan.most_round_trip < 0:
        yield "at no round trip"
    else:
        step = plan.pair.step_ms
        ms = "" if step is None else f" ({plan.most_round_trip * step:.1f} ms)"
        yield f"below R = {plan.most_round_trip:.2f} target steps{ms}"
