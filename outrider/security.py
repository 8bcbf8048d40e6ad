"""What a service's security settings come to: how it listens, who comes in, and how it calls others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from outrider.rpc.auth import AllowedClients, ClientLimits, Door, Tokens
from outrider.rpc.channel import is_local
from outrider.rpc.tls import FileProblem, ServerTLS
from outrider.settings import ServiceSettings, SettingsError

_log = structlog.get_logger()

Made = TypeVar("Made")


@dataclass(frozen=True)
class Listening:
    """How a service listens.

    Attributes:
        tls: None is plaintext.
        doors: what every call meets first.
    """

    tls: ServerTLS | None
    doors: list[Door]

    @property
    def transport(self) -> str:
        """For the log."""
        return "plaintext" if self.tls is None else "mutual TLS" if self.tls.asks_clients else "TLS"


def listening(settings: ServiceSettings) -> Listening:
    """How these settings have a service listen.

    Raises:
        SettingsError: they contradict each other, a file is not what it should be, or plaintext would leave this
            machine without having been asked for.
    """
    tls = _server_tls(settings)
    if settings.allow_client_san and settings.tls_client_ca is None:
        raise SettingsError("--allow-client-san needs --tls-client-ca: without it nobody vouches for a client's names")
    if settings.tls_client_ca is not None and settings.names_clients and not settings.allow_client_san:
        raise SettingsError(
            "--tls-client-ca needs --allow-client-san here: a verifier admits the clients that are named, and not all "
            "that have a certificate of the CA"
        )
    if tls is None:
        check_plaintext("--listen", settings.listen, settings.plaintext, "give --tls-cert and --tls-key")
    tokens = None
    if (path := settings.auth_token_file) is not None:
        tokens = made("--auth-token-file", lambda: Tokens(path))
        if tls is None and not is_local(settings.listen):
            _log.warning("tokens travel in plaintext, where whoever watches can take them", listen=settings.listen)
    allowed = AllowedClients(settings.allow_client_san) if settings.allow_client_san else None
    limits = _limits(settings)
    asks = any(each is not None for each in (allowed, tokens, limits))
    return Listening(tls, [Door(allowed=allowed, tokens=tokens, limits=limits)] if asks else [])


def check_plaintext(flag: str, address: str, asked_for: bool, instead: str) -> None:
    """Checks that plaintext stays on this machine, or is meant to leave it.

    Raises:
        SettingsError: neither.
    """
    if not asked_for and not is_local(address):
        raise SettingsError(
            f"{flag} {address} is not a loopback address, and plaintext there can be read on the way: {instead}, or "
            "--plaintext where the network is trusted"
        )


def made(flag: str, make: Callable[[], Made]) -> Made:
    """What comes of files.

    Raises:
        SettingsError: nothing; names the flag.
    """
    try:
        return make()
    except FileProblem as problem:
        raise SettingsError(f"{flag}: {problem}") from problem


def pair(cert_flag: str, cert: Path | None, key_flag: str, key: Path | None) -> tuple[Path, Path] | None:
    """A certificate and its key; None where neither is given.

    Raises:
        SettingsError: one alone is.
    """
    if cert is not None and key is not None:
        return cert, key
    if cert is not None or key is not None:
        given, missing = (cert_flag, key_flag) if cert is not None else (key_flag, cert_flag)
        raise SettingsError(f"{given} needs {missing}")
    return None


def _server_tls(settings: ServiceSettings) -> ServerTLS | None:
    files = pair("--tls-cert", settings.tls_cert, "--tls-key", settings.tls_key)
    ca = settings.tls_client_ca
    if files is None:
        if ca is not None:
            raise SettingsError("--tls-client-ca needs --tls-cert and --tls-key: only a TLS server can ask for it")
        return None
    return made("--tls-cert, --tls-key or --tls-client-ca", lambda: ServerTLS(*files, ca))


def _limits(settings: ServiceSettings) -> ClientLimits | None:
    if settings.client_rate is None and settings.max_client_sequences is None:
        if settings.client_burst is not None:
            raise SettingsError("--client-burst needs --client-rate")
        return None
    return ClientLimits(
        rate=settings.client_rate, burst=settings.client_burst, max_sequences=settings.max_client_sequences
    )
