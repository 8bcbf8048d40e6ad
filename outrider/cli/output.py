"""Output of commands: one JSON object, or one line for a failure."""

import codecs
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cli.processes import ServiceError
from outrider.client import Chunk, Completion, Event, OutriderError, Queued, Sample, Started
from outrider.evaluation import EvaluationError
from outrider.runtime.errors import CheckpointError

Command = TypeVar("Command", bound=Callable[..., Any])

# Log lines shown of a service that fails.
_SHOWN_LINES = 12


class Failure(click.ClickException):
    """Ends the command with one line on stderr and exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"outrider: {self.message}", err=True)


def fails_in_one_line(command: Command) -> Command:
    """Turns errors of a call, a service, an evaluation, a checkpoint, a file or standard input into a `Failure`."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (OutriderError, EvaluationError, CheckpointError) as error:
            raise Failure(str(error)) from error
        except ServiceError as error:
            for line in [line for line in error.log_lines if not _repeats(str(error), line)][-_SHOWN_LINES:]:
                click.echo(f"  | {line}", err=True)
            raise Failure(str(error)) from error
        except UnicodeDecodeError as error:
            raise Failure(not_text("standard input", error)) from error
        except BrokenPipeError:  # click ends the command without a message
            raise
        except OSError as error:  # standard output on a full disk, for example
            raise Failure(str(error)) from error

    return cast("Command", run)


def not_text(source: str, error: UnicodeDecodeError) -> str:
    """Why the bytes of this source are no text."""
    return f"{source} is not {error.encoding.upper()}: byte {error.start} is 0x{error.object[error.start]:02x}"


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turns a package that is not installed into a `Failure` that names the extra of this project that installs it;
    several extras are separated by commas.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise Failure(
            f"this command needs {error.name}, which is not installed: pip install -e '.[{extra}]' in a clone of "
            "Outrider"
        ) from error


def check_folder(flag: str, path: Path) -> None:
    """Refuses a file whose folder is missing, before the work whose result it gets.

    Raises:
        UsageError: as above.
    """
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"{flag} is {path}: there is no folder {path.parent}; make it first")


def check_picture(path: Path) -> None:
    """Refuses a picture that cannot be drawn, as `check_folder` does.

    Raises:
        UsageError: of its name.
        Failure: matplotlib is missing.
    """
    check_folder("--picture", path)
    if path.suffix not in (".png", ".svg"):
        raise click.UsageError(f"--picture is {path}: its name must end in .png or .svg")
    check_matplotlib("--picture")


def check_matplotlib(what: str) -> None:
    """Raises `Failure` if matplotlib, which `what` needs, is missing."""
    if find_spec("matplotlib") is None:
        raise Failure(f"matplotlib is not installed, and {what} needs it: pip install -e '.[bench]'")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turns an error of the file or folder `path` into a `Failure` that names the flag."""
    try:
        yield
    except OSError as error:
        raise Failure(f"{flag} is {path}: {error.strerror or error}") from error


def table(*columns: str, left: int = 1, no_wrap: bool = True) -> Table:
    """A table without rows. Columns are aligned to the right, except the first `left`."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        found.add_column(name, justify="left" if number < left else "right", no_wrap=no_wrap)
    return found


def print_table(out: Console, rows: Table) -> None:
    """Prints a table with all its figures: on a narrower terminal its lines wrap."""
    rows.width = out.measure(rows, options=out.options.update(max_width=10_000)).maximum
    out.print(rows, crop=False, no_wrap=True, overflow="ignore")


def written(events: Iterable[Event]) -> Iterator[Event]:
    """Writes the text of one sample to stdout as it comes, and a line to stderr if it is lossy, or waits in the queue.

    Yields each event.
    """
    is_queued = False
    for event in events:
        if isinstance(event, Queued) and not is_queued:
            is_queued = True
            click.echo(f"outrider: the request waits in the queue; calls ahead of it: {event.position}", err=True)
        if isinstance(event, Started):
            warn_of_loss(event)
        if isinstance(event, Chunk) and event.text:
            click.echo(event.text, nl=False)
        yield event


def warn_of_loss(started: Started) -> None:
    """Writes a line to stderr if a text is lossy."""
    if started.lossy:
        click.echo(
            f"outrider: this text is lossy: its distribution is not the target's (rule {started.rule})", err=True
        )


def _repeats(message: str, line: str) -> bool:
    """Whether a log line has the service's reason to end, which is in `message`."""
    return '"cannot serve"' in line or message.endswith(line.partition(": ")[2] or line)


def write_json(document: dict[str, Any]) -> None:
    """Writes one JSON object to stdout. Infinities and NaN become null.

    Where stdout is not UTF-8, as JSON must be, all but ASCII is escaped.
    """
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    click.echo(json.dumps(_finite(document), ensure_ascii=not is_utf8))


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def completion_document(completion: Completion) -> dict[str, Any]:
    """A generation as one JSON object: the first sample's fields, and `samples` if there are several."""
    request_id = {"request_id": completion.started.request_id}
    document = sample_document(completion.samples[0]) | request_id | started_document(completion.started)
    if completion.prompt_logprobs:
        document["prompt_logprobs"] = [asdict(entry) for entry in completion.prompt_logprobs]
    if len(completion.samples) > 1:
        document["samples"] = [sample_document(sample) for sample in completion.samples]
    return document


def started_document(started: Started) -> dict[str, Any]:
    """How a text is written."""
    return {name: getattr(started, name) for name in ("seed", "rule", "lossy", "drafter", "weights_fingerprint")}


def ended_document(text: Sample | Completion) -> dict[str, Any]:
    """How a text ended, and what it took."""
    parts = {name: asdict(getattr(text, name)) for name in ("usage", "statistics", "timings")}
    return {"finish_reason": text.finish_reason, **parts}


def sample_document(sample: Sample) -> dict[str, Any]:
    """One sample as a JSON object. Fields that are not set are left out."""
    document: dict[str, Any] = {name: getattr(sample, name) for name in ("index", "text", "token_ids")}
    document |= ended_document(sample)
    stops = {"stop": sample.stop, "stop_token_id": sample.stop_token_id}
    document |= {name: value for name, value in stops.items() if value is not None}
    if sample.logprobs:
        document["logprobs"] = [asdict(entry) for entry in sample.logprobs]
    if sample.rounds:
        document["origins"] = sample.origins
        document["rounds"] = [asdict(entry) for entry in sample.rounds]
    return document
