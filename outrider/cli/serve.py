"""`outrider serve`: serves a pair of models on this machine until a signal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.gateway import http_options, make_server
from outrider.cli.options import DRAFTERS, POLICIES, Address, flags_of_pair, model_options, serving_options
from outrider.cli.output import Failure, needs_extra
from outrider.cli.processes import Pair, ServiceError, running_pair, terminated_as_interrupted
from outrider.client import AsyncClient, Client, OutriderError
from outrider.environment import ENV_PREFIX
from outrider.rpc.channel import SOCKET, is_local
from outrider.service.logs import take_over, text_renderer

if TYPE_CHECKING:
    from outrider.http.server import HttpServer

_PREFIXES = {"verifier_service": "verifier | ", "draft_service": "draft    | "}
# Without a prefix these flags belong to the draft service: two services cannot share an address, and all clients of the
# verifier are one, the draft service.
_OF_DRAFT = ("metrics-listen", "health-listen", "client-rate", "client-burst", "max-client-sequences")
# Hosts to listen at, and where this machine then answers itself.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


@click.command(
    "serve",
    short_help="Your own pair on this machine.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [FLAGS OF THE SERVICES]",
)
@click.option("--target", metavar="DIR_OR_ID", required=True, help="Folder, hub id or GGUF file of the target.")
@click.option(
    "--draft",
    metavar="DIR_OR_ID",
    required=True,
    help="Folder, hub id or GGUF file of the draft model, of the same vocabulary.",
)
@click.option("--listen", type=Address(least_port=0), default="127.0.0.1:50051", help="Address of the draft service.")
@click.option(
    "--verifier-listen", type=Address(least_port=0), default="127.0.0.1:50052", help="Address of the verifier service."
)
@model_options
@click.option("--dtype", help="Number format of both models: float32, bfloat16, float16. Default: auto.")
@click.option(
    "--drafter",
    type=click.Choice(DRAFTERS),
    help="Source of proposed tokens for requests that name none; only model, parallel and staged load the weights "
    "of --draft. Default: model, or parallel if the draft has a mask token.",
)
@click.option(
    "--tokens-per-pass",
    metavar="N",
    type=click.IntRange(1, 256),
    help="With --drafter parallel: tokens that one pass of the draft drafts. Default: 8.",
)
@click.option(
    "--staged-by",
    type=click.Choice(["lookup", "ngram"]),
    help="With --drafter staged: source of the tokens that the draft model checks. Default: lookup.",
)
@click.option(
    "--ngram-corpus",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="With n-grams as drafter: text file in which they are counted at start-up.",
)
@click.option(
    "--speculation",
    type=click.Choice(POLICIES),
    help="Policy that chooses gamma for requests that name none. Default: adaptive.",
)
@click.option(
    "--http",
    "http",
    type=Address(least_port=0),
    help="Serve OpenAI's HTTP API at this address too, for example 127.0.0.1:8000. Default: do not.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="")
@serving_options
@http_options
def serve_command(
    verifier_listen: str, threads: int | None, http: str | None, flags: tuple[str, ...], **values: Any
) -> None:
    """Serve a pair of models on this machine: a verifier service with the target, a draft service with the draft.

    The logs of both services go to stdout: text with a prefix on a terminal, elsewhere one JSON object a line. Ctrl-C
    or SIGTERM stops both after the requests in progress; a second Ctrl-C stops them at once. If a service or the front
    fails, the others are stopped, and the exit code is 1.

    TLS and tokens protect the draft service. Between the services is plaintext, so a --verifier-listen that is not
    loopback needs --plaintext.

    With --http an OpenAI-compatible front runs in this process, as `outrider gateway` runs it in one of its own. It
    calls the draft service in plaintext, so a draft service with TLS needs `outrider gateway`. Needs the extra `http`.

    Any other flag goes to each service that has it: --max-sequences, --log-level. A prefix names one service:
    --verifier-kv-cache-mb, --draft-revision. --metrics-listen, --health-listen, --client-rate, --client-burst and
    --max-client-sequences are the draft service's without a prefix, and so are their variables, and those of TLS and
    tokens. `python -m draft_service --help` and `python -m verifier_service --help` list all flags.

    \b
    outrider serve --target DIR_OR_ID --draft DIR_OR_ID --max-sequences 16 --metrics-listen 127.0.0.1:9100
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    given = {name: os.environ.get(f"{ENV_PREFIX}{name.replace('-', '_').upper()}") for name in _OF_DRAFT}
    flags = (*(f"--{name}={value}" for name, value in given.items() if value is not None), *flags)
    with needs_extra("service"):
        more_verifier, more_draft = split_flags(flags)
    front = None
    http_values = {name: values.pop(name) for name in list(values) if name.startswith("http_")}
    if http is not None:
        if values["tls_cert"] is not None:
            raise click.UsageError(
                "--http and --tls-cert do not go together: leave out --http, and run outrider gateway with --tls-ca"
            )

        def connect() -> AsyncClient:  # once the front runs, beside `pair`
            draft, token_file = _called(pair.address), values["auth_token_file"]
            return AsyncClient(draft, timeout=60.0, retry_timeout=5.0, token_file=token_file, plaintext=True)

        front = make_server(http, http_values, connect, vllm_metrics=shows_vllm(more_draft))
    verifier_flags, draft_flags = flags_of_pair({"threads": threads, **values})
    verifier_flags, draft_flags = verifier_flags + more_verifier, draft_flags + more_draft
    try:
        with (
            terminated_as_interrupted(),
            running_pair(
                verifier_flags,
                draft_flags,
                verifier_listen=verifier_listen,
                threads=threads,
                on_line=_printer(),
            ) as pair,
        ):
            # No timeout: a model may have to be downloaded first.
            pair.wait_healthy(math.inf)
            click.echo(f"Serving at {pair.address}.{_suggestion(pair.address, values)}", err=True)
            if front is None:
                pair.watch()
            else:
                _run_front(front, pair)
    except ServiceError as error:
        raise Failure(str(error)) from error  # its log is written already
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)


def _printer() -> Callable[[str, str], None]:
    """Returns a function that prints a line of a service's log: as text on a terminal."""
    text = text_renderer() if sys.stdout.isatty() else None
    # The pipes of the services must be read even if standard output blocks.
    take_over("outrider")

    def write(name: str, line: str) -> None:
        if line.startswith(f"{name}: "):  # its reason to end, which the command's last line repeats
            return
        if text is not None:
            if line.startswith("{"):
                with contextlib.suppress(Exception):  # a library may print braces, too
                    line = text(json.loads(line))
            line = _PREFIXES[name] + line
        click.echo(line)

    return write


def _run_front(front: HttpServer, pair: Pair) -> None:
    """Runs the front beside the pair; never returns.

    Raises:
        ServiceError: a service has ended.
        Failure: the front has ended.
    """
    from outrider.http.server import BackgroundServer, FrontEnded

    with BackgroundServer(front) as beside:
        click.echo(f"OpenAI's API is at {front.url}/v1", err=True)
        try:
            pair.watch(also=beside.check)
        except FrontEnded as error:
            raise Failure(str(error)) from error


def _suggestion(address: str, values: Mapping[str, Any]) -> str:
    """A command that the pair answers; none if the draft service requires more than a token of `--auth-token-file`."""
    draft, token_file = _called(address), values["auth_token_file"]
    try:
        with Client(draft, timeout=5.0, retry_timeout=0.0, token_file=token_file, plaintext=True) as client:
            takes_speech = bool(client.get_model().target.encoder.sample_rate)
    except (OutriderError, ValueError):
        return ""
    command, prompt = ("transcribe", "FILE") if takes_speech else ("generate", '"def add(a, b):"')
    token = f" --token-file {token_file}" if token_file else ""
    plaintext = "" if is_local(draft) else " --plaintext"
    return f" Try: outrider {command} --draft {draft}{token}{plaintext} {prompt}"


def _called(address: str) -> str:
    """The address of a listener, as this machine calls it."""
    host, _, port = address.rpartition(":")
    return address if address.startswith(SOCKET) else f"{_LOOPBACK.get(host, host)}:{port}"


def shows_vllm(draft_flags: Sequence[str]) -> bool:
    """Whether a draft service with these flags shows vLLM's metrics: its front then does so, too."""
    given = [flag for flag in draft_flags if flag in ("--vllm-metrics", "--no-vllm-metrics")]
    if given:
        return given[-1] == "--vllm-metrics"
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(bool).validate_python(os.environ.get(f"{ENV_PREFIX}VLLM_METRICS", "0"))
    except ValidationError:  # the services name it, and end
        return False


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits flags of the services into those of the verifier and those of the draft service.

    Raises:
        UsageError: no service has such a flag, or its value is missing.
    """
    kinds = {
        "verifier": _fields("verifier_service", "VerifierSettings"),
        "draft": _fields("draft_service", "DraftSettings"),
    }
    shares: dict[str, list[str]] = {"verifier": [], "draft": []}
    left = iter(arguments)
    for argument in left:
        name, equals, _ = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            raise click.UsageError(f"{argument!r} is not a flag; flags begin with --")
        owners = _owners(name, kinds)
        if not owners:
            near = get_close_matches(name, {flag for flags in kinds.values() for flag in flags}, n=1)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise click.UsageError(f"no service has a flag --{name}{hint}")
        value = []
        if not equals and not any(kinds[service][flag] for service, flag in owners.items()):
            value = [next(left, "")]
            if not value[0]:
                raise click.UsageError(f"--{name} needs a value: --{name} VALUE")
        for service, flag in owners.items():
            shares[service] += [argument.replace(f"--{name}", f"--{flag}", 1), *value]
    return shares["verifier"], shares["draft"]


def _owners(name: str, kinds: dict[str, dict[str, bool]]) -> dict[str, str]:
    """The services that have this flag, each with the name of the flag there."""
    if name in _OF_DRAFT:
        return {"draft": name}
    if services := [service for service, flags in kinds.items() if name in flags]:
        return dict.fromkeys(services, name)
    service, _, flag = name.partition("-")
    return {service: flag} if flag in kinds.get(service, ()) else {}


def _fields(package: str, settings: str) -> dict[str, bool]:
    """The flags of a service, each with whether it takes no value. Imported by name: this package must not depend on
    the services.
    """
    fields = getattr(import_module(f"{package}.settings"), settings).model_fields
    flags = {}
    for name, field in fields.items():
        is_switch = field.annotation is bool
        flags[name.replace("_", "-")] = is_switch
        if is_switch:
            flags[f"no-{name.replace('_', '-')}"] = True
    return flags
