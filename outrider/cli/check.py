"""`outrider check`: whether a deployment's text is distributed as its target's."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from outrider.cli.bench import read_prompts
from outrider.cli.options import (
    DRAFTERS,
    POSITIVE,
    RETRY_TIMEOUT_S,
    DeviceName,
    FloatRange,
    Numbers,
    calling_options,
    check_speech_options,
    connected,
    draft_option,
    prompts_file_option,
    speech_options,
    timeout_option,
)
from outrider.cli.output import Failure, needs_extra, print_table, table, write_json
from outrider.cli.progress import progress
from outrider.client import AsyncClient, Drafter, OutriderError
from outrider.evaluation import EvaluationError
from outrider.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from outrider.evaluation.check_report import Report
    from outrider.evaluation.check_requests import Plan, Step

# Sampled texts of each rule under load, and tokens of each: the reference without --target is one request a token.
_TEXTS, _TOKENS = {True: 1536, False: 768}, {True: 9, False: 6}
_QUICK = 6
_STAGES = {"alone": "Texts one at a time", "under load": "Texts under load", "reference": "Reference"}
_FILTERS = ("temperature", "top_k", "top_p", "min_p")


class CheckFailure(Failure):
    """The check could not run: exit code 2, since 1 means a biased deployment."""

    exit_code = 2


@click.command("check", short_help="Check that a deployment is exact.")
@draft_option()
@click.option(
    "--target",
    metavar="DIR_OR_ID",
    help="The verifier's checkpoint, to load here as the reference. Default: none; the deployment without a draft is "
    "the reference, and only speculation is tested.",
)
@click.option("--device", type=DeviceName(), default="auto", help="Device of the copy of --target.")
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16", "float16")),
    help="Dtype of the copy of --target. Default: that of the verifier.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with --target.")
@click.option("--quick", is_flag=True, help="A sixth of the texts: less than one minute for small models.")
@click.option(
    "--texts",
    type=click.IntRange(min=1),
    help="Sampled texts of each rule under load; a third as many are cut and resumed, and a twelfth are alone. "
    f"Default: {_TEXTS[True]:,}; without --target {_TEXTS[False]:,}.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=3),
    help=f"Tokens of each sampled text. Default: {_TOKENS[True]}; without --target {_TOKENS[False]}.",
)
@click.option("--at-once", type=click.IntRange(min=1), default=32, help="Requests under load.")
@prompts_file_option("built-in ones")
@speech_options
@click.option("--temperature", type=FloatRange(min=1e-6, max=100), help="Sample with this setting alone.")
@click.option("--top-k", type=click.IntRange(min=0), help="Sample with this setting alone.")
@click.option("--top-p", type=FloatRange(min=0, max=1, min_open=True), help="Sample with this setting alone.")
@click.option("--min-p", type=FloatRange(min=0, max=1), help="Sample with this setting alone.")
@click.option(
    "--gammas",
    type=Numbers(click.IntRange(1)),
    help="Fixed gammas, in turn. Default: 1,2,4 and the service's own policy.",
)
@click.option("--drafter", type=click.Choice(DRAFTERS), help="Source of proposed tokens. Default: the service's.")
@click.option(
    "--rounding",
    metavar="NATS",
    type=FloatRange(min=0),
    help="Difference of two logits that counts as rounding. Default: 0.0005 in float32, 0.03 in float16, 0.2 in "
    "bfloat16 and of other GGUF files.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the requests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@timeout_option("Time after which a request fails.", kind=POSITIVE)
@calling_options
def check_command(draft: str, timeout: float, as_json: bool, **values: Any) -> None:
    """Check that the text of a deployment is distributed as its target's.

    The command is a client like any other. At temperature 0, and for one seed under the rule coupled, it compares texts
    with and without a draft, token for token. It compares sampled tokens of each exact rule with the target's
    distributions: alone, under load, and after it cut its own streams and resumed them. An exact deployment fails once
    in 10,000 runs.

    Exit codes: 0: no bias was found; 1: the deployment is biased; 2: the check could not run.

    \b
    outrider check --quick --target models/demo/target
    outrider check --draft 127.0.0.1:50051 --target DIR_OR_ID --device cuda
    outrider check --top-p 0.9 --temperature 0.7 --json
    outrider check --audio clips --language en
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    check_speech_options(values, values["prompts_file"])
    if values["drafter"] == Drafter.NONE:
        raise CheckFailure("--drafter is none: there is no speculation to check; give another one")
    try:
        report = _checked(draft, timeout, values)
        if as_json:
            write_json(document(report))
        else:
            draw(Console(highlight=False), report)
    except click.UsageError:
        raise
    except (Failure, OutriderError, EvaluationError, CheckpointError, OSError) as error:
        raise CheckFailure(str(error)) from error
    except KeyboardInterrupt:
        raise CheckFailure("interrupted: nothing was decided") from None
    except Exception as error:  # click would exit with 1, as for a biased deployment
        traceback.print_exc()
        raise CheckFailure(f"the check failed, so nothing was decided: {error!r}") from error
    if report.is_biased:
        click.get_current_context().exit(1)


def _checked(address: str, timeout: float, values: dict[str, Any]) -> Report:
    with needs_extra("service"):
        from outrider.evaluation.check import check
        from outrider.evaluation.reference import Copy
    copy = None
    if values["target"] is not None:
        copy = Copy(values["target"], values["dtype"], values["device"], values["trust_remote_code"])
    plan = _plan(values)
    # Without timestamps: whether their rules ban text may depend on rounding.
    speech = {name: values[name] for name in ("audio", "language", "task")}

    async def run(step: Step) -> Report:
        async with connected(address, timeout, RETRY_TIMEOUT_S, values, kind=AsyncClient) as client:
            return await check(client, plan, copy, step, speech)

    with _progress() as step:
        return asyncio.run(run(step))


def _plan(values: dict[str, Any]) -> Plan:
    from outrider.evaluation.check_requests import Plan, sampling

    is_local = values["target"] is not None
    texts = values["texts"] or _TEXTS[is_local] // (_QUICK if values["quick"] else 1)
    more: dict[str, Any] = {}
    if values["prompts_file"] is not None:
        more["prompts"] = read_prompts(values["prompts_file"])
    if values["gammas"]:
        more["gammas"] = values["gammas"]
    given = {name: values[name] for name in _FILTERS if values[name] is not None}
    if given:
        more["settings"] = (sampling(**given),)
    return Plan(
        load=texts,
        alone=max(1, texts // 12),
        resumed=max(1, texts // 3),
        tokens=values["tokens"] or _TOKENS[is_local],
        equal=3 if values["quick"] else 8,
        at_once=values["at_once"],
        drafter=values["drafter"],
        rounding=values["rounding"],
        seed=values["seed"],
        **more,
    )


@contextmanager
def _progress() -> Iterator[Step]:
    """Counts the steps of each stage, and shows them."""
    with progress() as update:
        counts = Counter[str]()

        def step(stage: str, done: int, total: int) -> None:
            counts[stage] += done
            update(_STAGES[stage], counts[stage], total)

        yield step


def document(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    return {"is_biased": report.is_biased, "verdict": report.verdict, "finds": report.finds, **asdict(report)}


# ----------------------------------------------------------------------------------------------------------- drawing


def draw(out: Console, report: Report) -> None:
    """Draws what was compared, and the verdict in words."""
    reference = "the deployment without a draft"
    if report.reference_dtype:
        reference = f"a local copy of the target in {report.reference_dtype}"
    out.print(f"target {report.target} ({report.dtype}), draft {report.draft}; reference: {reference}", soft_wrap=True)
    shares = [f"{rule} {report.accepted[rule]:,} of {count:,}" for rule, count in sorted(report.drafted.items())]
    out.print(
        f"drafted tokens accepted: {', '.join(shares)}; texts cut and resumed: {report.num_resumed:,}; "
        f"{report.seconds:.0f} s",
        soft_wrap=True,
    )
    out.print()
    print_table(out, _equalities(report))
    out.print()
    print_table(out, _tests(report))
    out.print(
        "finds: the total variation that a test finds with a chance of 95%: of next tokens, after the most frequent "
        "contexts; of three tokens, between 27 cells of equal chance (8 if there are few); –: too few tokens",
        soft_wrap=True,
    )
    out.print()
    for number, sentence in enumerate(report.verdict):
        style = ("bold red" if report.is_biased else "bold green") if number == 0 else ""
        out.print(sentence, style=style, soft_wrap=True)


def _equalities(report: Report) -> Table:
    rows = table("text", "compared with", "where", "texts", "tokens", "near-ties", "differences", left=3)
    for each in report.equalities:
        numbers = (each.texts, each.tokens, each.near_ties, each.differences)
        style = "bold red" if each.is_biased else ""
        rows.add_row(each.kind, each.reference, each.where, *(f"{number:,}" for number in numbers), style=style)
    return rows


def _tests(report: Report) -> Table:
    """One row for each rule and place, with the p-values of its tests."""
    names = ("tokens", "p: next\ntoken", "finds", "p: three tokens,\nby probability", "by id", "finds")
    found = table("sampled text", "where", *names, left=2)
    rows: dict[tuple[str, str], list[Any]] = {}
    for each in report.tests:
        rows.setdefault((each.rule, each.where), []).append(each)
    for (rule, where), tests in rows.items():
        values = [f"[bold red]{each.fit.p_value:.1g}[/]" if each.is_biased else _p(each) for each in tests]
        finds = ["–" if each.finds is None else f"{each.finds:.2f}" for each in tests]
        values = [values[0], finds[0], *values[1:], finds[1]]  # that of three tokens is the same by id
        found.add_row(rule, where, f"{tests[0].tokens:,}", *values)
    return found


def _p(test: Any) -> str:
    return f"{test.fit.p_value:.2g}" if test.fit.df else "–"
