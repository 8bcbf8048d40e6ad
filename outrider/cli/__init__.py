"""The `outrider` command. It starts services and talks to them; no model runs in its own process."""

from importlib import metadata

import click

from outrider.cli.demo import demo_command
from outrider.cli.generate import generate_command
from outrider.cli.serve import serve_command

try:
    VERSION = metadata.version("outrider")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    VERSION = "unknown (not installed)"


@click.group(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "OUTRIDER",
        "max_content_width": 100,
    }
)
@click.version_option(VERSION, prog_name="outrider")
def main() -> None:
    r"""Exact speculative decoding as two gRPC services.

    A draft service runs a small model and proposes tokens; a verifier service runs the target model, accepts the
    longest prefix that keeps the target's own law, and adds one token of its own. The text comes out faster, and is
    distributed exactly as the target alone would have written it.

    \b
    outrider demo
    outrider serve --target DIR_OR_ID --draft DIR_OR_ID
    outrider generate "def add(a, b):"

    Each service also starts by itself, on a machine of its own: see `python -m verifier_service --help` and
    `python -m draft_service --help`. Every option can be set in the environment too, for example
    OUTRIDER_GENERATE_DRAFT for `outrider generate --draft`; flags win.
    """


main.add_command(demo_command)
main.add_command(generate_command)
main.add_command(serve_command)
