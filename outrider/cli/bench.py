"""`outrider bench`: measures a pair of services that run already, and writes a report."""

import asyncio
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from outrider.cli.demo import warn_of_busy_processors
from outrider.cli.options import (
    DRAFTERS,
    POSITIVE,
    RETRY_TIMEOUT_S,
    FloatRange,
    Numbers,
    calling_options,
    check_speech_options,
    connected,
    draft_option,
    prompts_file_option,
    speech_options,
    timeout_option,
    timestamps_option,
)
from outrider.cli.output import Failure, check_matplotlib, not_text, write_json, writing
from outrider.cli.progress import progress
from outrider.client import AsyncClient, Drafter, OutriderError, Prompt
from outrider.client.transcription import most_tokens
from outrider.environment import installed_version
from outrider.evaluation.clips import clips_for
from outrider.evaluation.deployment import PROMPTS, Json, Run, Settings, measure, missing, summarise
from protos.outrider.v1 import draft_service_pb2 as pb

# In place of the defaults, with --quick.
_QUICK: Json = {"gammas": (2, 6), "streams": (1, 4), "texts": 2, "max_new_tokens": 48}


@click.command("bench", short_help="Measure a pair of services that run already.")
@draft_option()
@click.option(
    "--gammas", type=Numbers(click.IntRange(1)), help="Fixed gammas, beside the default policy. Default: 2,4,8."
)
@click.option(
    "--drafters",
    metavar="NAME[,...]",
    help="Drafters; the first one drafts with each gamma, the others with the middle one. Default: all of the service "
    "but random, its default first.",
)
@click.option("--temperatures", type=Numbers(FloatRange(0, 100)), help="Temperatures of the texts. Default: 0,1.")
@click.option("--streams", type=Numbers(click.IntRange(1)), help="How many texts at once. Default: 1,4,16.")
@click.option("--texts", type=click.IntRange(min=1), help="Texts of each stream in each repeat. Default: 4.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), help="Tokens of each text. Default: 64.")
@click.option("--repeats", type=click.IntRange(min=1), help="How often each figure is measured. Default: 3.")
@click.option("--stop-at-eos", is_flag=True, help="Let texts end at the model's end-of-sequence tokens.")
@prompts_file_option("built-in ones")
@speech_options
@timestamps_option
@click.option("--quick", is_flag=True, help="Fewer and shorter texts: less than two minutes for small models.")
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bench-report"),
    help="Folder of report.html, report.md and report.json; made if it is missing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object in place of the table.")
@timeout_option("Time after which a text fails.", kind=POSITIVE)
@calling_options
def bench_command(
    draft: str,
    drafters: str | None,
    prompts_file: Path | None,
    quick: bool,
    output: Path,
    as_json: bool,
    timeout: float,
    **values: Any,
) -> None:
    """Measure a draft service with its target: the target alone, fixed gammas, the default policy, each drafter.

    The command is a client like any other. It prints a table, and writes a report with pictures and a JSON file. Use
    services without other load: they share their time with other clients. If it is interrupted, or a text fails, it
    writes what it has measured, and says what is missing.

    \b
    outrider bench --quick
    outrider bench --draft 127.0.0.1:50051 --streams 1,4,16,64 --prompts-file mine.jsonl --output report
    outrider bench --audio clips --language en
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    check_matplotlib("the report")
    prompts = PROMPTS if prompts_file is None else read_prompts(prompts_file)
    names = None if drafters is None else _drafters(drafters)
    check_speech_options(values, prompts_file)
    speech = {name: values.pop(name) for name in ("audio", "language", "task", "timestamps")}
    asked = {name: values.pop(name) for name in list(values) if name in Settings.__dataclass_fields__}
    settings = Settings(
        prompts, **{**(_QUICK if quick else {}), **{name: value for name, value in asked.items() if value}}
    )
    with writing("--output", output):
        output.mkdir(parents=True, exist_ok=True)
    document: Json = {
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "address": draft,
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": installed_version(),
    }
    found, failure = _Measured(settings), None
    try:
        asyncio.run(_measure(draft, timeout, values, names, speech, found))
    except OutriderError as error:
        if not found.runs:
            raise
        failure = Failure(str(error))
    except KeyboardInterrupt:
        failure = Interrupted("interrupted" if found.runs else "interrupted: nothing was measured")
        if not found.runs:
            raise failure from None
    cells = summarise(found.runs, found.settings)
    document |= {
        "models": found.models,
        "settings": _settings(found.settings, prompts_file, speech["audio"]),
        "cells": cells,
    }
    document["missing"] = missing(cells, found.settings)
    _write(document, output, as_json)
    if failure is not None:
        for sentence in document["missing"]:
            click.echo(f"outrider: not measured: {sentence}", err=True)
        raise failure


class Interrupted(Failure):
    """Ends the command as a shell reports an interrupt."""

    exit_code = 130


@dataclass(slots=True)
class _Measured:
    """What a measurement has found so far."""

    settings: Settings
    models: Json = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)


async def _measure(
    address: str, timeout: float, calling: Json, drafters: list[Drafter] | None, speech: Json, found: _Measured
) -> None:
    async with connected(address, timeout, RETRY_TIMEOUT_S, calling, kind=AsyncClient) as client:
        pair = await client.get_model()
        settings = replace(found.settings, drafters=_chosen(pair, drafters))
        settings = found.settings = _of_speech(pair, settings, speech)
        found.models = {"target": _model(pair.target), "draft": _model(pair.model)}
        _check(pair, settings)
        warn_of_busy_processors(address)
        written = 0
        with progress("texts") as update:

            def report(stage: str, cell: str, texts: int) -> None:
                nonlocal written
                written += texts
                update(stage, written, settings.num_texts, cell)

            await measure(client, settings, found.runs, report)


def _model(info: Any) -> Json:
    return {name: getattr(info, name) for name in ("name", "dtype", "device", "weights_fingerprint")}


def _drafters(text: str) -> list[Drafter]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DRAFTERS or name == Drafter.NONE:
            offered = ", ".join(each for each in DRAFTERS if each != Drafter.NONE)
            raise click.UsageError(f"--drafters: {name!r} is not one of {offered}")
    return [Drafter(name) for name in dict.fromkeys(names)]


def _chosen(found: pb.DraftServiceGetModelResponse, asked: Iterable[Drafter] | None) -> tuple[Drafter, ...]:
    """The drafters to measure.

    Raises:
        Failure: the service does not offer them, or none at all.
    """
    offered = [Drafter.of(number) for number in found.drafters]
    if asked is not None:
        for each in asked:
            if each not in offered:
                raise Failure(f"--drafters: the service does not offer {each}; it offers {', '.join(offered)}")
        return tuple(asked)
    default = Drafter.of(found.default_drafter)
    chosen = [each for each in dict.fromkeys([default, *offered]) if each not in (Drafter.NONE, Drafter.RANDOM)]
    if not chosen:
        raise Failure(
            "the service offers no drafter to compare with the target alone; start it with --drafter model or lookup"
        )
    return tuple(chosen)


def _check(found: pb.DraftServiceGetModelResponse, settings: Settings) -> None:
    """Refuses settings with which no text can be written. Warns of streams that will wait.

    Raises:
        Failure: the service has no target, or a value exceeds its limits.
    """
    if not found.HasField("target") or not found.target.name:
        raise Failure("the draft service reports no target; start it with --verifier HOST:PORT")
    limits = [info.limits for info in (found.model, found.target)]
    most = min((each.max_gamma for each in limits if each.max_gamma), default=0)
    if most and max(settings.gammas) > most:
        raise Failure(f"--gammas has {max(settings.gammas)}; the most of these services is {most} (--max-gamma)")
    running = min((each.max_sequences for each in limits if each.max_sequences), default=0)
    if running and max(settings.streams) > running:
        click.echo(
            f"outrider: --streams has {max(settings.streams)}, and the services run {running} at once "
            "(--max-sequences): the others wait in the queue, and their waits count",
            err=True,
        )


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts, one JSON object a line: its `text`, or a conversation in `messages`.

    Raises:
        Failure: the file cannot be read, or a line holds neither.
    """
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other separators, such as U+2028
    except UnicodeDecodeError as error:
        raise Failure(not_text(f"--prompts-file {path}", error)) from error
    except OSError as error:
        raise Failure(f"--prompts-file {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, f"--prompts-file {path}: line {number}"))
    if not prompts:
        raise Failure(f"--prompts-file {path} has no prompts")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise Failure(f'{where} is not JSON: {error}; write for example {{"text": "def mean(values):"}}') from error
    value = None
    if isinstance(entry, dict):
        value = entry.get("text") or entry.get("messages")
    if not isinstance(value, str | list):
        raise Failure(f"{where} has neither text nor messages")
    return value


def _of_speech(pair: pb.DraftServiceGetModelResponse, settings: Settings, speech: Json) -> Settings:
    """The settings for clips of speech, if there are any: a transcription ends where the model ends it.

    Raises:
        EvaluationError: a clip cannot be used, or the pair takes text.
    """
    clips = clips_for(pair.target, **speech)
    if not clips:
        return settings
    most = min(settings.max_new_tokens, most_tokens(pair))
    return replace(settings, prompts=clips, stop_at_eos=True, max_new_tokens=most)


def _settings(settings: Settings, prompts_file: Path | None, audio: Sequence[Path]) -> Json:
    shown: Json = {name: getattr(settings, name) for name in Settings.__dataclass_fields__ if name != "prompts"}
    return shown | {
        "prompts": None if prompts_file is None else prompts_file.name,
        "audio": [path.name for path in audio],
        "drafters": [each.value for each in settings.drafters],
        "used_prompts": settings.num_prompts,
        "given_prompts": len(settings.prompts),
    }


def _write(document: Json, output: Path, as_json: bool) -> None:
    from outrider.evaluation import deployment_report  # imports matplotlib

    text = json.dumps(document, ensure_ascii=False, indent=1)
    (output / "report.json").write_text(text + "\n", encoding="utf-8")
    sentences = [*deployment_report.conclusions(document), deployment_report.prompts_line(document)]
    summary = "\n".join([deployment_report.table(document).markdown(padded=True), "", *sentences])
    (output / "report.md").write_text(summary + "\n", encoding="utf-8")
    (output / "report.html").write_text(deployment_report.html(document), encoding="utf-8")
    if as_json:
        write_json(document)
        return
    click.echo(summary)
    click.echo(f"Report: {output / 'report.html'}")
