"""`outrider generate`: text from a draft service that runs already."""

import sys
from typing import Any

import click

from outrider.cli.chat import template_option
from outrider.cli.options import (
    calling_options,
    connected,
    draft_option,
    request_of,
    request_options,
    retry_timeout_option,
    temperature_option,
    timeout_option,
)
from outrider.cli.output import completion_document, warn_of_loss, write_json, written
from outrider.client import Client, Completion, Message, Options, Prompt


@click.command("generate", short_help="Text from a draft service that runs already.")
@click.argument("prompt")
@draft_option("a text continues")
@click.option("--max-new-tokens", type=int, help="Maximum tokens to generate. Default: 256.")
@click.option("--chat", is_flag=True, help="PROMPT is a message to a model with a chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@template_option
@timeout_option("Time after which the call fails.")
@retry_timeout_option("the request")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@calling_options
@temperature_option("1")
@request_options
def generate_command(
    prompt: str,
    draft: str,
    chat: bool,
    system: str | None,
    timeout: float,
    retry_timeout: float | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Continue PROMPT with a draft service; `-` reads the prompt from standard input.

    Text goes to stdout as it comes. A line on stderr says if the text is lossy, or if the request waits in the queue.
    Exit codes: 0; 1 with the gRPC status in one line on stderr; 2 for wrong usage.

    \b
    outrider generate --temperature 0 "def add(a, b):"
    outrider generate --chat --system "Be brief." "What is a monad?"
    outrider generate --json --seed 7 --top-p 0.9 - < prompt.txt
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    if system is not None and not chat:
        raise click.UsageError("--system is for a conversation; give --chat too")
    if values["template_arguments"] and not chat:
        raise click.UsageError("--template-argument is for a conversation; give --chat too")
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is not None and not as_json:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} are part of the JSON output; give --json too")
    with connected(draft, timeout, retry_timeout, values) as client:
        options = request_of(values)
        whole = _prompt(sys.stdin.read() if prompt == "-" else prompt, chat, system)
        if as_json:
            completion = client.complete(whole, **options)
            write_json(completion_document(completion) | {"tokens_per_second": _speed(completion)})
        elif options.get("n", 1) > 1:
            _print_samples(client, whole, options)
        else:
            for _ in written(client.generate(whole, **options)):
                pass
            click.echo()


def _speed(completion: Completion) -> float:
    """Tokens per second of all samples together, by the clock of the draft service."""
    seconds = max(sample.timings.total_us for sample in completion.samples) / 1e6
    tokens = sum(sample.usage.completion_tokens for sample in completion.samples)
    return tokens / seconds if seconds else 0.0


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat:
        return text
    first = [Message("system", system)] if system is not None else []
    return [*first, Message("user", text)]


def _print_samples(client: Client, prompt: Prompt, options: Options) -> None:
    completion = client.complete(prompt, **options)
    warn_of_loss(completion.started)
    for sample in completion.samples:
        click.echo(f"--- {sample.index + 1} of {len(completion.samples)} ({sample.finish_reason})")
        click.echo(sample.text)
