"""The `outrider` command. It starts services and talks to them; no model runs in its own process."""

import click

from outrider.cli.chat import chat_command
from outrider.cli.demo import demo_command
from outrider.cli.generate import generate_command
from outrider.cli.info import info_command
from outrider.cli.serve import serve_command
from outrider.cli.transcribe import transcribe_command
from outrider.environment import installed_version, mistyped

PREFIX = "OUTRIDER"


@click.group(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": PREFIX,
        "max_content_width": 100,
    }
)
@click.version_option(installed_version(), prog_name="outrider")
@click.pass_context
def main(context: click.Context) -> None:
    """Exact speculative decoding as two gRPC services.

    A draft service runs a small model and proposes tokens; a verifier service runs the target model, accepts the
    longest prefix that keeps the target's own distribution, and adds one token of its own. The text comes out faster,
    and is distributed exactly as the target alone would have written it.

    \b
    outrider demo
    outrider serve --target DIR_OR_ID --draft DIR_OR_ID
    outrider generate "def add(a, b):"
    outrider chat
    outrider transcribe talk.wav
    outrider info 127.0.0.1:50051

    Each service can also run on a machine of its own: see `python -m verifier_service --help` and
    `python -m draft_service --help`. Every option can be set in the environment too, for example
    OUTRIDER_GENERATE_DRAFT for `outrider generate --draft`; flags win.
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    command = main.commands.get(context.invoked_subcommand or "")
    if command is not None:
        prefix = f"{PREFIX}_{str(command.name).upper()}_"
        known = {f"{prefix}{str(option.name).upper()}" for option in command.params}
        for variable, nearest in mistyped(known, prefix).items():
            click.echo(f"outrider: {variable} is unknown and is ignored; the nearest name is {nearest}", err=True)


for each in (chat_command, demo_command, generate_command, info_command, serve_command, transcribe_command):
    main.add_command(each)
