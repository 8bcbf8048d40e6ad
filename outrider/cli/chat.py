"""`outrider chat`: a conversation with a draft service that runs already."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import click

from outrider.cli.options import Address, calling_options, connected, request_of, sampling_options, temperature_option
from outrider.cli.output import Failure, fails_in_one_line, warn_of_loss
from outrider.client import Chunk, Client, InvalidRequest, Message, Options, Started


@click.command("chat", short_help="A conversation, in this terminal.")
@click.option(
    "--draft",
    type=Address(several=True),
    default="127.0.0.1:50051",
    show_default=True,
    help="Address of the draft service; with several, a text continues at another one if one fails.",
)
@click.option("--system", metavar="TEXT", help="The system message, before the first message.")
@click.option("--max-new-tokens", type=int, help="Maximum tokens to generate. Default: 256.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=float,
    default=300.0,
    show_default=True,
    help="Time after which the call fails.",
)
@calling_options
@temperature_option("1")
@sampling_options
@fails_in_one_line
def chat_command(draft: str, system: str | None, timeout: float, **values: Any) -> None:
    """Talk with a model that has a chat template.

    Each line is a message. /new starts a new conversation. Ctrl-C ends an answer, and Ctrl-D the command.
    """
    with connected(draft, timeout, None, values) as client:
        options = request_of(values)
        target = client.get_model(timeout=min(timeout, 10.0)).target
        if not target.has_chat_template:
            raise Failure(f"{target.name} has no chat template: use `outrider generate`, which continues a text")
        click.echo(f"{target.name}. /new: new conversation; Ctrl-D: end.", err=True)
        first = [Message("system", system)] if system is not None else []
        messages = list(first)
        while (text := _read()) is not None:
            if text == "/new":
                messages = list(first)
            elif text:
                messages = _answered(client, [*messages, Message("user", text)], options)


def _read() -> str | None:
    """The next line; None at the end of the input, and after Ctrl-C."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # not on every system
            import readline  # noqa: F401  # `input` edits lines with it
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None


def _answered(client: Client, messages: list[Message], options: Options) -> list[Message]:
    """Writes the answer, and returns the conversation with it; without the last message if it is refused."""
    answer: list[str] = []
    try:
        for event in client.generate(messages, **options):
            if isinstance(event, Started):
                warn_of_loss(event)
            if isinstance(event, Chunk):
                answer.append(event.text)
                click.echo(event.text, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # the text so far stays in the conversation
    except InvalidRequest as error:  # too long, for example
        click.echo(f"outrider: {error}; /new starts a new conversation", err=True)
        return messages[:-1]
    click.echo()
    return [*messages, Message("assistant", "".join(answer))]
