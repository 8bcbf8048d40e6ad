"""`outrider gateway`: an OpenAI-compatible front of draft services that run already."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    POSITIVE,
    Address,
    FloatRange,
    calling_options,
    connected,
    draft_option,
    framing_options,
    group,
    request_of,
)
from outrider.cli.output import Failure, needs_extra
from outrider.cli.processes import terminated_as_interrupted
from outrider.client import AsyncClient
from outrider.rpc.channel import ip_address
from outrider.service.logs import take_over

if TYPE_CHECKING:
    from outrider.http.server import HttpServer

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

# Of calls that generate nothing; a text has --http-timeout.
_ASK_S = 60.0
_PORTS = {"http": ":80", "https": ":443"}


def _host_names(_context: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> list[str]:
    """The names as a Host header is compared with them: in lower case, without a port."""
    for name in names:
        bare = name.removeprefix("*.").strip(".")
        is_name = bare and not set(bare) & set("*/:")
        if name != "*" and not is_name and ip_address(name.strip("[]")) is None:
            raise click.BadParameter(f"{name} is no name alone, such as api.example.org or *.example.org")
    return [name.lower().rstrip(".") for name in names]


def _origins(_context: click.Context, _option: click.Parameter, origins: tuple[str, ...]) -> list[str]:
    """The origins as browsers write them: in lower case, without the scheme's own port."""
    found = []
    for origin in origins:
        scheme, _, host = origin.lower().rstrip("/").partition("://")
        is_origin = re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and host and not set(host) & set("/?#@")
        if origin not in ("*", "null") and not is_origin:
            raise click.BadParameter(f"{origin} is not an origin, such as https://example.org")
        found.append(f"{scheme}://{host.removesuffix(_PORTS.get(scheme, ''))}" if host else origin)
    return found


# Of the front, without `--http` itself; see `make_server`.
http_options = group(
    click.option("--http-tls-cert", metavar="FILE", type=_FILE, help="Certificate of the front (PEM); turns TLS on."),
    click.option("--http-tls-key", metavar="FILE", type=_FILE, help="Private key of --http-tls-cert (PEM)."),
    click.option(
        "--http-key-file",
        metavar="FILE",
        type=_FILE,
        help="File of API keys, one a line; every HTTP request must carry one, but for /health, /metrics and "
        "the page of the playground.",
    ),
    click.option(
        "--http-plaintext",
        is_flag=True,
        help="Allow plaintext, and no keys, at addresses that other machines reach.",
    ),
    click.option(
        "--http-allowed-host",
        metavar="NAME",
        multiple=True,
        callback=_host_names,
        help="Name that HTTP clients may call the front by, beside localhost and addresses; *.NAME: all names under "
        "it; *: all. Repeatable.",
    ),
    click.option(
        "--http-cors-origin",
        metavar="ORIGIN",
        multiple=True,
        callback=_origins,
        help="Origin of web pages whose scripts may call the front, for example https://example.org. Repeatable. "
        "Default: none.",
    ),
    click.option(
        "--http-client-rate",
        metavar="N",
        type=POSITIVE,
        help="Texts a second that one HTTP client may start in the long run. Default: no limit.",
    ),
    click.option(
        "--http-client-burst",
        metavar="N",
        type=click.IntRange(min=1),
        help="Texts that one HTTP client may start at once after a pause. Default: those of one second.",
    ),
    click.option(
        "--http-max-client-sequences",
        metavar="N",
        type=click.IntRange(min=1),
        help="Maximum texts in progress of one HTTP client. Default: no limit.",
    ),
    click.option(
        "--http-max-samples",
        metavar="N",
        type=click.IntRange(min=1),
        default=256,
        help="Maximum texts of one HTTP request: prompts times n.",
    ),
    click.option(
        "--http-max-body-bytes",
        metavar="BYTES",
        type=click.IntRange(min=1024),
        default=16 * 1024 * 1024,
        help="Maximum size of an HTTP request's body; of a transcription's it is 25 MiB.",
    ),
    click.option(
        "--http-timeout",
        metavar="SECONDS",
        type=POSITIVE,
        default=600.0,
        help="Time after which an HTTP request fails.",
    ),
    click.option(
        "--http-grace",
        metavar="SECONDS",
        type=FloatRange(min=1),
        default=30.0,
        help="Time for answers in progress to end after a signal.",
    ),
    click.option(
        "--http-playground/--no-http-playground",
        default=True,
        help="Serve the playground at /. Without keys, everyone who reaches the front can use it.",
    ),
    click.option(
        "--http-model", metavar="NAME", help="Name of the model for HTTP clients. Default: that of the target."
    ),
)


def make_server(
    address: str,
    values: dict[str, Any],
    connect: Callable[[], AsyncClient],
    *,
    framing: Mapping[str, Any] | None = None,
    vllm_metrics: bool = False,
) -> HttpServer:
    """The front, bound to its address; takes the values of `http_options` out of `values`.

    Args:
        values: of the command line.
        connect: makes its client.

    Raises:
        UsageError: they contradict each other, or a file has the wrong content.
        Failure: the address is taken, or the extra `http` is not installed.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    given = {name.removeprefix("http_"): values.pop(name) for name in list(values) if name.startswith("http_")}
    with needs_extra("http"):
        from outrider.http.server import HttpServer
        from outrider.http.settings import ServerSettings
    settings = ServerSettings(
        address,
        allowed_hosts=given.pop("allowed_host"),
        cors_origins=given.pop("cors_origin"),
        **given,
        framing=framing or {},
        vllm_metrics=vllm_metrics,
    )
    try:
        return HttpServer(settings, connect)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise Failure(f"cannot listen at {address}: {error.strerror or error}; choose another address") from error


@click.command("gateway", short_help="An OpenAI-compatible front of draft services.")
@draft_option("texts continue")
@click.option("--http", "http", type=Address(least_port=0), default="127.0.0.1:8000", help="Address of the front.")
@click.option(
    "--retry-timeout",
    metavar="SECONDS",
    type=FloatRange(min=0),
    default=30.0,
    help="How long to retry, or to continue a text that has begun, while no draft service accepts it.",
)
@click.option(
    "--vllm-metrics", is_flag=True, help="Show metrics under vLLM's names too, at /metrics of --http, without a key."
)
@framing_options
@calling_options
@http_options
def gateway_command(draft: str, http: str, retry_timeout: float, vllm_metrics: bool, **values: Any) -> None:
    """Serve OpenAI's HTTP API in front of the draft services at --draft, until a signal.

    /v1/models, /v1/completions, /v1/chat/completions, /v1/audio/transcriptions, /tokenize, /detokenize,
    /tokenizer_info, /health, /version and /metrics. On Ctrl-C or SIGTERM answers in progress may end within
    --http-grace. Needs the extra `http`.

    --frame-bytes, --frame-pace and --fixed-size-rounds hold for every text, between the front and the verifier. They
    switch off the playground; the first two also transcriptions, and log-probabilities of prompts. Answers to HTTP
    clients are not padded.

    --tls, --tls-ca, --tls-cert, --tls-key, --tls-name, --token-file and --plaintext are about the calls of draft
    services; the options that begin with --http are about HTTP clients. Beyond this machine the front demands TLS and
    keys, or --http-plaintext.

    \b
    outrider gateway --draft 127.0.0.1:50051 --http 127.0.0.1:8000
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph

    def connect() -> AsyncClient:
        return connected(draft, _ASK_S, retry_timeout, dict(values), AsyncClient)

    framing = request_of({name: values.pop(name) for name in ("frame_bytes", "frame_pace", "fixed_size_rounds")})
    take_over("outrider")  # else a full pipe would block the event loop
    server = make_server(http, values, connect, framing=framing, vllm_metrics=vllm_metrics)
    try:
        with terminated_as_interrupted():
            click.echo(f"Serving OpenAI's API at {server.url}/v1", err=True)
            server.run()
    except KeyboardInterrupt:
        pass
    click.echo("Stopped.", err=True)
