"""`outrider serve`: one's own pair on this machine, until told to stop."""

from __future__ import annotations

import math
from typing import Any

import click

from outrider.cli.options import DRAFTERS, POLICIES, Address, flags_of_pair, model_options, serving_options
from outrider.cli.output import Failure
from outrider.cli.processes import ServiceError, running_pair, terminated_as_interrupted
from outrider.service.logs import take_over

_PREFIXES = {"verifier_service": "verifier | ", "draft_service": "draft    | "}


@click.command("serve", short_help="Your own pair on this machine.")
@click.option("--target", metavar="DIR_OR_ID", required=True, help="Folder or hub id of the target model.")
@click.option(
    "--draft",
    metavar="DIR_OR_ID",
    required=True,
    help="Folder or hub id of the draft model; same vocabulary as the target.",
)
@click.option(
    "--listen",
    type=Address(),
    default="127.0.0.1:50051",
    show_default=True,
    help="Address of the draft service, which clients call.",
)
@click.option(
    "--verifier-listen",
    type=Address(),
    default="127.0.0.1:50052",
    show_default=True,
    help="Address of the verifier service.",
)
@model_options
@click.option("--dtype", help="Number format of both models: float32, bfloat16, float16. Default: the services choose.")
@click.option(
    "--drafter",
    type=click.Choice(DRAFTERS),
    help="What proposes tokens if a request names nothing; with another one than model and staged only the tokenizer "
    "of --draft is loaded. Default: model.",
)
@click.option(
    "--staged-by",
    type=click.Choice(["lookup", "ngram"]),
    help="What proposes tokens to the draft model in the drafter staged. Default: lookup.",
)
@click.option(
    "--ngram-corpus",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Text file whose n-grams the drafter ngram counts.",
)
@click.option(
    "--speculation",
    type=click.Choice(POLICIES),
    help="Policy that chooses gamma if a request names nothing. Default: adaptive.",
)
@serving_options
def serve_command(verifier_listen: str, threads: int | None, **values: Any) -> None:
    """Serve a pair of models on this machine: a verifier service with the target, a draft service with the draft.

    Port 0 takes a free one. The logs of both services go to stdout, with a prefix. Ctrl-C or SIGTERM stops both;
    requests in progress finish first, and a second Ctrl-C does not wait for them. If one service fails, the other is
    stopped, and the exit code is 1.

    TLS and tokens protect the draft service. The two services use plaintext between them; a --verifier-listen that is
    not loopback needs --plaintext.
    """
    verifier_flags, draft_flags = flags_of_pair({"threads": threads, **values})
    # The pipes of the services are read however slowly standard output is.
    take_over(lambda lines: f"outrider | {lines} log lines dropped")

    def pass_through(name: str, line: str) -> None:
        click.echo(_PREFIXES[name] + line)

    try:
        with (
            terminated_as_interrupted(),
            running_pair(
                verifier_flags,
                draft_flags,
                verifier_listen=verifier_listen,
                threads=threads,
                on_line=pass_through,
            ) as pair,
        ):
            # A model from a hub may have to be fetched first: no limit, but for a service that ends.
            pair.wait_healthy(math.inf)
            click.echo(f'Serving. Try: outrider generate --draft {pair.address} "def add(a, b):"', err=True)
            pair.watch()
    except ServiceError as error:
        raise Failure(str(error)) from error  # its log was passed through already
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
