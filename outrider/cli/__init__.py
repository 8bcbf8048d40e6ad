"""The `outrider` command. It starts services and talks to them; only `alpha` and `check` run models in it.

`convert` reads one.
"""

# First: it prepares gRPC, which the others import.
from outrider.rpc import core  # noqa: F401

# isort: split
import io
import os
import sys

import click

from outrider.cli.alpha import alpha_command
from outrider.cli.bench import bench_command
from outrider.cli.chat import chat_command
from outrider.cli.check import check_command
from outrider.cli.convert import convert_command
from outrider.cli.demo import demo_command
from outrider.cli.gateway import gateway_command
from outrider.cli.generate import generate_command
from outrider.cli.info import info_command
from outrider.cli.output import fails_in_one_line
from outrider.cli.plan import plan_command
from outrider.cli.serve import serve_command
from outrider.cli.trace import trace_command
from outrider.cli.transcribe import transcribe_command
from outrider.environment import ENV_PREFIX, installed_version, unknown_variables


class _Commands(click.Group):
    make_context = fails_in_one_line(click.Group.make_context)  # writes --version and --help
    invoke = fails_in_one_line(click.Group.invoke)


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": ENV_PREFIX.rstrip("_"),
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(installed_version(), prog_name="outrider", allow_from_autoenv=False)
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
    outrider gateway
    outrider transcribe talk.wav
    outrider info 127.0.0.1:50051
    outrider alpha --target DIR_OR_ID --draft DIR_OR_ID
    outrider bench --quick
    outrider check --quick --target DIR_OR_ID
    outrider convert DIR_OR_ID OUT.gguf
    outrider plan --alpha 0.8 --c 0.05
    outrider trace --picture trace.svg "def add(a, b):"

    Each service can also run on a machine of its own: see `python -m verifier_service --help` and
    `python -m draft_service --help`. Every option can be set in the environment too, for example
    OUTRIDER_GENERATE_DRAFT for `outrider generate --draft`; flags win.
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    _prepare_streams()
    for variable, nearest in unknown_variables(_variables(context.invoked_subcommand or "")).items():
        hint = f"the nearest name is {nearest}" if nearest else "docs/reference/settings.md lists all variables"
        click.echo(f"outrider: {variable} is unknown and is ignored; {hint}", err=True)


def _prepare_streams() -> None:
    """Escapes characters that the encoding of the output lacks, and replaces closed streams by empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _variables(invoked: str) -> dict[str, str]:
    """The variables of all commands by their names without OUTRIDER_, and those of the invoked one by its options."""
    by_name: dict[str, str] = {}
    for name, command in main.commands.items():
        for option in command.params:
            if isinstance(option, click.Option):
                tail = f"{name}_{option.name}".upper()
                by_name[tail] = ENV_PREFIX + tail
                if name == invoked:
                    by_name[str(option.name).upper()] = ENV_PREFIX + tail
    return by_name


for each in (
    alpha_command,
    bench_command,
    chat_command,
    check_command,
    convert_command,
    demo_command,
    gateway_command,
    generate_command,
    info_command,
    plan_command,
    serve_command,
    trace_command,
    transcribe_command,
):
    main.add_command(each)
