"""`outrider chat`: a conversation with a draft service that runs already."""

import json
import re
import sys
from contextlib import suppress
from typing import Any

import click

from outrider.cli.options import (
    calling_options,
    connected,
    draft_option,
    request_of,
    sampling_options,
    temperature_option,
    timeout_option,
)
from outrider.cli.output import Failure, written
from outrider.client import (
    Chunk,
    Client,
    Finished,
    FinishReason,
    InvalidRequest,
    Message,
    Options,
    OutriderError,
)


class TemplateArgument(click.ParamType[tuple[str, Any]]):
    """`NAME=VALUE`; the value is JSON, or else text."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        name, equals, text = str(value).partition("=")
        if not (name and equals):
            self.fail(f"'{value}' is not NAME=VALUE", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


template_option = click.option(
    "--template-argument",
    "template_arguments",
    metavar="NAME=VALUE",
    type=TemplateArgument(),
    multiple=True,
    help="Variable of the chat template, such as enable_thinking=false. The value is JSON, or else text. Repeatable.",
)


@click.command("chat", short_help="A conversation, in this terminal.")
@draft_option("a text continues")
@click.option("--system", metavar="TEXT", help="The system message, before the first message.")
@click.option("--max-new-tokens", type=int, help="Maximum tokens to generate. Default: 256.")
@timeout_option("Time after which the call fails.")
@calling_options
@temperature_option("1")
@sampling_options
@template_option
def chat_command(draft: str, system: str | None, timeout: float, **values: Any) -> None:
    """Talk with a model that has a chat template.

    Each line is a message. /new starts a new conversation. Ctrl-C ends an answer; /quit or Ctrl-D ends the chat.
    """
    with connected(draft, timeout, None, values) as client:
        options = request_of(values)
        pair = client.get_model(timeout=min(timeout, 10.0))
        if not pair.model.has_chat_template:
            raise Failure(f"{pair.model.name} has no chat template; use `outrider generate`, which continues a text")
        click.echo(f"Chat with {pair.target.name}. {_COMMANDS}", err=True)
        first = [Message("system", system)] if system is not None else []
        messages = list(first)
        while (text := _read()) is not None:
            if text == "/new":
                messages = list(first)
            elif text in ("/quit", "/exit"):
                return
            elif re.fullmatch(r"/\w*", text):
                click.echo(f"outrider: there is no command {text}. {_COMMANDS}", err=True)
            elif text:
                messages = _answered(client, [*messages, Message("user", text)], options)


_COMMANDS = "/new starts a new conversation; Ctrl-C ends an answer; /quit or Ctrl-D ends the chat."


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _read() -> str | None:
    """The next line; None at the end of the input. Ctrl-C drops a line."""
    if _is_interactive():
        with suppress(ImportError):  # not on every system
            import readline  # noqa: F401  # `input` edits lines with it
    while True:
        try:
            return input("> " if _is_interactive() else "").strip()
        except EOFError:
            click.echo(err=True)
            return None
        except KeyboardInterrupt:
            if not _is_interactive():
                return None
            click.echo("\nCtrl-D ends the chat.", err=True)


def _answered(client: Client, messages: list[Message], options: Options) -> list[Message]:
    """Writes the answer, and returns the conversation with it; without the last message if the call fails."""
    answer: list[str] = []
    is_cut = False
    try:
        for event in written(client.generate(messages, **options)):
            if isinstance(event, Chunk):
                answer.append(event.text)
            if isinstance(event, Finished):
                is_cut = event.finish_reason is FinishReason.LENGTH
    except KeyboardInterrupt:
        pass  # the text so far stays in the conversation
    except InvalidRequest as error:  # too long, for example
        click.echo(f"outrider: {error}; /new starts a new conversation", err=True)
        return messages[:-1]
    except OutriderError as error:
        if not _is_interactive():
            raise
        click.echo(f"\noutrider: {error}; the conversation continues before this message", err=True)
        return messages[:-1]
    click.echo()
    if is_cut:
        click.echo("outrider: the answer is cut off at --max-new-tokens", err=True)
    return [*messages, Message("assistant", "".join(answer))]
