"""Options of commands that say how to speak to services, and what they come to. They read no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from outrider.client import TLS, Client

Command = TypeVar("Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False)

_CALLING = (
    click.option("--tls", is_flag=True, help="Speak TLS; the CAs that come with gRPC vouch for the service."),
    click.option("--tls-ca", metavar="FILE", type=_FILE, help="Speak TLS; this CA vouches for the service."),
    click.option("--tls-cert", metavar="FILE", type=_FILE, help="Certificate to show to a service that asks for one."),
    click.option("--tls-key", metavar="FILE", type=_FILE, help="Its private key."),
    click.option("--tls-name", metavar="NAME", help="Name in the service's certificate. Default: that of --draft."),
    click.option("--token-file", metavar="FILE", type=_FILE, help="Bearer token that goes with the request."),
    click.option("--plaintext", is_flag=True, help="Speak plaintext to another machine, where the network is trusted."),
)

_SERVING = (
    click.option("--tls-cert", metavar="FILE", type=_FILE, help="Certificate of the draft service: it speaks TLS."),
    click.option("--tls-key", metavar="FILE", type=_FILE, help="Its private key."),
    click.option("--tls-client-ca", metavar="FILE", type=_FILE, help="Clients must show a certificate of this CA."),
    click.option("--allow-client-san", metavar="NAME", multiple=True, help="And it must have this name. Repeatable."),
    click.option("--auth-token-file", metavar="FILE", type=_FILE, help="Clients must send one of these bearer tokens."),
    click.option("--plaintext", is_flag=True, help="Listen in plaintext for other machines too."),
)


def calling_options(command: Command) -> Command:
    """The options of a command that calls a draft service; see `security_of`."""
    return _apply(_CALLING, command)


def serving_options(command: Command) -> Command:
    """The options of a command that starts services; see `flags_of`."""
    return _apply(_SERVING, command)


def security_of(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the values of `calling_options` out of `values`, and returns the arguments of `Client` they come to.

    Raises:
        UsageError: they contradict each other.
    """
    wanted, ca, cert, key, name, token, plaintext = (
        values.pop(each) for each in ("tls", "tls_ca", "tls_cert", "tls_key", "tls_name", "token_file", "plaintext")
    )
    tls = TLS(ca, cert, key, name) if wanted or ca else None
    if tls is None and (cert or key or name):
        raise click.UsageError("--tls-cert, --tls-key and --tls-name need --tls-ca or --tls")
    return {"tls": tls, "token_file": token, "plaintext": plaintext}


def connected(addresses: str, timeout: float, security: dict[str, Any], *, patience: float | None = None) -> Client:
    """The client for these addresses.

    Raises:
        UsageError: they are not loopback, and nothing says that plaintext is meant; or a file is not what it should be.
    """
    try:
        return Client(addresses, timeout=timeout, patience=patience, **security)
    except ValueError as error:
        text = str(error).replace("tls=TLS(...)", "--tls-ca or --tls").replace("plaintext=True", "--plaintext")
        raise click.UsageError(text) from error


def flags_of(values: dict[str, Any]) -> tuple[str, ...]:
    """The flags of the draft service that the values of `serving_options` come to."""
    flags: list[str] = ["--plaintext"] if values["plaintext"] else []
    for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"):
        if values[name] is not None:
            flags += [f"--{name.replace('_', '-')}", values[name]]
    for san in values["allow_client_san"]:
        flags += ["--allow-client-san", san]
    return tuple(flags)


def _apply(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
