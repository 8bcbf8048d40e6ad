"""`outrider alpha`: the chance that a drafted token is accepted, measured on text of the target, without services."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from rich.console import Console
from rich.table import Table

from outrider.cli.bench import read_prompts
from outrider.cli.demo import MODELS, demo_model
from outrider.cli.options import (
    DeviceName,
    FloatRange,
    Numbers,
    check_speech_options,
    prompts_file_option,
    speech_options,
    timestamps_option,
)
from outrider.cli.output import Failure, needs_extra, print_table, table, write_json
from outrider.cli.progress import progress
from outrider.evaluation import ALPHA_DRAFTERS, DRAFT_MODELS
from outrider.evaluation.intervals import LEAST_OBSERVATIONS
from outrider.rpc.errors import counted

if TYPE_CHECKING:
    from outrider.evaluation.alpha import Estimate, Measurement, Options
    from outrider.evaluation.local_models import PromptText

_COUNTING = {"unigram", "bigram"}
_WORK = {
    "loading": "Loading the models",
    "counting": "Counting n-grams",
    "writing": "The target writes",
    "measuring": "Measuring",
    "searching": "Searching",
}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("alpha", short_help="Measure the chance that a drafted token is accepted.")
@click.option("--target", metavar="DIR_OR_ID", help="Target: a folder or a hub id. Default: the demo's.")
@click.option(
    "--draft", metavar="DIR_OR_ID", help="Draft of model and parallel. Default: the demo's, if --target is not given."
)
@click.option(
    "--drafter",
    "drafters",
    type=click.Choice(ALPHA_DRAFTERS),
    multiple=True,
    help="Source of drafted tokens. unigram and bigram are ngram with n-grams of 1 and 2 tokens. The drafter staged "
    "has the α of model. Of parallel, α is the mean over a pass. Repeatable. Default: model.",
)
@prompts_file_option("the demo's")
@speech_options
@timestamps_option
@click.option("--tokens", type=click.IntRange(min=1), default=10_000, help="About how many tokens the target writes.")
@click.option(
    "--text-tokens",
    metavar="INTEGER",
    type=click.IntRange(min=1),
    help="Maximum tokens of one text. Default: so many that each prompt is used once, but 64 to 512.",
)
@click.option(
    "--temperature",
    type=FloatRange(0, 100),
    default=1.0,
    help="Divides the target's logits, and the draft's; 0: the most probable token.",
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Keep the K most probable tokens; 0: all.")
@click.option(
    "--top-p",
    type=FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Keep the most probable tokens whose probabilities sum to this.",
)
@click.option(
    "--min-p",
    type=FloatRange(0, 1),
    default=0.0,
    help="Drop tokens less probable than this share of the most probable one.",
)
@click.option(
    "--repetition-penalty",
    type=FloatRange(0.01, 100),
    default=1.0,
    help="Divides positive and multiplies negative logits of tokens in prompt or text.",
)
@click.option(
    "--presence-penalty",
    type=FloatRange(-100, 100),
    default=0.0,
    help="Subtracted from the logit of each token in the text.",
)
@click.option(
    "--frequency-penalty",
    type=FloatRange(-100, 100),
    default=0.0,
    help="Subtracted from the logit of a token for each time it is in the text.",
)
@click.option(
    "--draft-temperature",
    metavar="FLOAT",
    type=FloatRange(0, 100),
    help="Temperature of the draft, above --temperature 0. Default: --temperature.",
)
@click.option(
    "--lenience",
    "leniences",
    type=Numbers(FloatRange(0, 1, min_open=True), name="L[,...]"),
    default="1",
    help="Lenience of the acceptance rule: 1 is exact; with L no token is sampled more than 1/L times as often.",
)
@click.option("--ngram-corpus", metavar="FILE", type=_FILE, help="Text file whose n-grams are counted.")
@click.option(
    "--ngram-documents",
    type=click.Choice(("file", "line")),
    default="file",
    help="Unit of --ngram-corpus; no n-gram crosses two.",
)
@click.option("--ngram-order", type=click.IntRange(1, 8), default=4, help="Tokens of the longest n-grams of ngram.")
@click.option("--ngram-entries", type=click.IntRange(min=1), default=1 << 20, help="Maximum n-grams to keep.")
@click.option(
    "--tokens-per-pass",
    metavar="N",
    type=click.IntRange(1, 256),
    default=8,
    help="Tokens that parallel drafts in one pass of the draft.",
)
@click.option(
    "--skip-layers",
    metavar="LAYERS",
    help="Layers of the target, from 0 on: without them it is the draft. 3,5-7, or every-3 for every third.",
)
@click.option(
    "--find-skip-layers",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Find N layers of the target for --skip-layers: leave out one after another, each time the one without which "
    "α is highest.",
)
@click.option(
    "--lookup-min-match",
    type=click.IntRange(1, 64),
    default=2,
    help="Shortest match, in tokens, after which lookup copies.",
)
@click.option(
    "--keep-mass",
    type=FloatRange(0, 1, min_open=True),
    default=0.99,
    help="Probability mass to keep of the draft's distribution.",
)
@click.option(
    "--max-support",
    type=click.IntRange(1, 256),
    default=256,
    help="Maximum tokens to keep of the draft's distribution.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seed of the target's texts.")
@click.option("--device", type=DeviceName(), default="auto", help="Device of both models: cpu, cuda, cuda:1.")
@click.option(
    "--dtype",
    type=click.Choice(("auto", "float32", "bfloat16", "float16")),
    default="auto",
    help="Dtype of both models; auto: that of the checkpoint, if the device is fast at it.",
)
@click.option(
    "--threads", metavar="INTEGER", type=click.IntRange(1, 4096), help="CPU threads. Default: all processors."
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def alpha_command(
    target: str | None, draft: str | None, prompts_file: Path | None, as_json: bool, **values: Any
) -> None:
    """Measure α, the chance that a drafted token is accepted, without services.

    The target continues the prompts, or transcribes --audio. At each position of its text both distributions are
    computed as the services compute them; α is the mean of Σ min(p, q). The intervals are of 95 %. With several
    drafters and leniences, one text serves all.

    \b
    outrider alpha
    outrider alpha --temperature 0 --lenience 1,0.5,0.3,0.1
    outrider alpha --target DIR_OR_ID --draft DIR_OR_ID --prompts-file prompts.jsonl --top-k 40
    outrider alpha --target models/speech/target --draft models/speech/draft --audio models/speech/clips
    outrider alpha --target DIR_OR_ID --prompts-file prompts.jsonl --tokens 2000 --find-skip-layers 8
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    drafters = tuple(dict.fromkeys(values.pop("drafters"))) or ("model",)
    is_own_draft = values["skip_layers"] is not None or values["find_skip_layers"] > 0
    if is_own_draft and (draft is not None or drafters != ("model",)):
        raise click.UsageError("--skip-layers and --find-skip-layers make the draft: leave out --draft and --drafter")
    if values["skip_layers"] is not None and values["find_skip_layers"]:
        raise click.UsageError("give --skip-layers, or --find-skip-layers, not both")
    if draft is None and not is_own_draft and DRAFT_MODELS.intersection(drafters):
        if target is not None:
            raise click.UsageError("--target is given, so give --draft too, or a --drafter that needs no draft model")
        draft = demo_model("draft")
    target = target or demo_model("target")
    check_speech_options(values, prompts_file)
    for name in drafters:
        if name in _COUNTING and values["ngram_corpus"] is None:
            raise click.UsageError(f"--drafter {name} has no text to count: give --ngram-corpus FILE")
    values["ngram_by_line"] = values.pop("ngram_documents") == "line"
    with needs_extra("service"):
        from outrider.evaluation import alpha
    prompts: tuple[PromptText, ...] = ()
    if not values["audio"]:
        prompts = tuple(cast("list[PromptText]", read_prompts(prompts_file or _demo_prompts())))
    options = alpha.Options(target=target, draft=draft, drafters=drafters, prompts=prompts, **values)
    with progress("tokens") as update:
        found = alpha.run(options, lambda work, done, total: update(_WORK[work], done, total))
    if as_json:
        write_json(document(options, found))
    else:
        draw(Console(highlight=False), options, found)


def _demo_prompts() -> Path:
    path = MODELS / "prompts.jsonl"
    if not path.is_file():
        raise Failure(f"the demo's prompts are not at {path}; give --prompts-file FILE")
    return path


def document(options: Options, found: Measurement) -> dict[str, Any]:
    """The measurement as one JSON object: the settings, without the prompts, and what was found."""
    settings = {name: value for name, value in asdict(options).items() if name not in ("prompts", "drafters")}
    paths = {
        "ngram_corpus": options.ngram_corpus and str(options.ngram_corpus),
        "audio": [str(path) for path in options.audio],
    }
    return settings | paths | {"requested_tokens": options.tokens} | asdict(found)


def draw(out: Console, options: Options, found: Measurement) -> None:
    """Draws a row for each drafter and a column for each lenience; or a row for each layer that was found."""
    is_partial = any(each.drafted_share < 1 for each in found.estimates)
    is_lenient = options.leniences != (1.0,)
    if found.steps:
        out.print(_table_of_steps(found))
    else:
        print_table(out, _table_of_drafters(options, found))
    out.print()
    lines = [
        f"{found.tokens:,} tokens of the target in {counted(found.texts, 'text')} after "
        f"{counted(found.prompts, 'speech window' if options.audio else 'prompt')}; "
        f"{_sampling(options)}; {found.dtype} on {found.device}."
    ]
    if found.estimates:
        lines.append(_intervals(found))
    if is_lenient:
        lines.append("l: lenience; below 1 the text is lossy.")
    if is_partial:
        lines.append("drafted: the share of positions at which the drafter proposes a token; α is over these.")
    if found.tokens < options.tokens:
        lines.append(
            f"{options.tokens:,} tokens were requested, but at temperature 0 each prompt gives one text: give more "
            "prompts, or a larger --text-tokens."
        )
    if found.steps:
        name, flag = options.target, found.steps[-1].skip_layers
        lines.append(f"To serve: outrider serve --target {name} --draft {name} --drafter model --skip-layers {flag}")
    for line in lines:
        out.print(line, soft_wrap=True)


def _table_of_drafters(options: Options, found: Measurement) -> Table:
    is_partial = any(each.drafted_share < 1 for each in found.estimates)
    names = ["α"] if options.leniences == (1.0,) else [f"α, l = {lenience:g}" for lenience in options.leniences]
    rows = table("drafter", *names, *(["drafted"] if is_partial else []), left=1 + len(names))
    for drafter in options.drafters:
        own = [each for each in found.estimates if each.drafter == drafter]
        rows.add_row(drafter, *map(_cell, own), *([f"{own[0].drafted_share:.0%}"] if is_partial else []))
    return rows


def _table_of_steps(found: Measurement) -> Table:
    rows = table("layers left out", "α", left=2, no_wrap=False)
    for step in found.steps:
        rows.add_row(step.skip_layers, f"{step.alpha:.3f}")
    return rows


def _cell(each: Estimate) -> str:
    if each.positions == 0:
        return "–"
    if each.interval is None or each.observations < LEAST_OBSERVATIONS:
        return f"{each.alpha:.3f}"
    return "{:.3f} ({:.3f}–{:.3f})".format(each.alpha, *each.interval)


def _intervals(found: Measurement) -> str:
    """What the intervals count, by drafter if that differs."""
    counts = dict.fromkeys(each.observations for each in found.estimates)
    known = [count for count in counts if count >= LEAST_OBSERVATIONS]
    if not known:
        return f"Too few observations for an interval: {counted(max(counts), found.observation)}."
    least, most = min(known), max(known)
    observations = counted(most, found.observation) if least == most else f"{least} to {most} {found.observation}s"
    said = f"In brackets: 95 %, with {observations} as independent observations."
    return said if len(known) == len(counts) else f"{said} Below {LEAST_OBSERVATIONS} there is no interval."


def _sampling(options: Options) -> str:
    parts = [f"temperature {options.temperature:g}"]
    if options.temperature > 0:
        parts += [f"top-k {options.top_k}"] if options.top_k else []
        parts += [f"top-p {options.top_p:g}"] if options.top_p < 1 else []
        parts += [f"min-p {options.min_p:g}"] if options.min_p else []
        parts += [] if options.draft_temperature is None else [f"draft temperature {options.draft_temperature:g}"]
    penalties = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    values = {name: getattr(options, f"{name}_penalty") for name in penalties}
    parts += [f"{name} penalty {value:g}" for name, value in values.items() if value != penalties[name]]
    return ", ".join(parts)
