"""TLS of listeners and of channels, from PEM files that are read anew when they change.

A server asks for its files before each handshake; a channel has those of the moment it was made (`outrider.rpc.renewal`
replaces it).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from outrider.rpc.watched import FileProblem, Watched


@dataclass(frozen=True, slots=True)
class TLS:
    """How a channel speaks TLS.

    Attributes:
        ca: PEM file of the certificates that vouch for the server; None: the public ones that come with gRPC.
        cert: PEM file of our own certificate, and of those between it and its CA; for a server that asks for one.
        key: PEM file of its private key, without a passphrase.
        name: the name that the server's certificate must have; None: the host that was asked for.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    name: str | None = None


class ChannelTLS:
    """Credentials of channels, as the files have them now.

    Raises:
        FileProblem: a file is missing, or is not what it should be; or one of certificate and key is not given.
    """

    def __init__(self, tls: TLS) -> None:
        self.name = tls.name
        ca, cert, key = (None if path is None else Path(path) for path in (tls.ca, tls.cert, tls.key))
        if (cert is None) != (key is None):
            raise FileProblem("a certificate and its key go together: only one of them is given")

        def read() -> grpc.ChannelCredentials:
            roots = None if ca is None else _authority(ca)
            secret, chain = (None, None) if cert is None or key is None else _pair(cert, key)
            return grpc.ssl_channel_credentials(roots, secret, chain)

        self._watched = Watched([path for path in (ca, cert, key) if path is not None], read)

    def look(self) -> tuple[int, grpc.ChannelCredentials]:
        """How often the files have changed so far, and the credentials that they make."""
        return self._watched.look()


class ServerTLS:
    """Credentials of a listener. With a `client_ca` no handshake succeeds without a certificate that it vouches for.

    Raises:
        FileProblem: a file is missing, or is not what it should be.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        def read() -> Any:
            return grpc.ssl_server_certificate_configuration(
                [_pair(cert, key)], root_certificates=None if client_ca is None else _authority(client_ca)
            )

        paths = (cert, key) if client_ca is None else (cert, key, client_ca)
        self._watched = Watched(paths, read)
        self.asks_clients = client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """What a server listens with; one for each port."""
        shown, first = self._watched.look()

        def fetch() -> Any:
            """Called by gRPC, on a thread of its own, before each handshake; None is no change."""
            nonlocal shown
            version, configuration = self._watched.look()
            if version == shown:
                return None
            shown = version
            return configuration

        # A CA alone verifies those only who care to show a certificate: authentication has to be required as well.
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=self.asks_clients)


def _authority(path: Path) -> bytes:
    """The certificates of a CA file.

    Raises:
        FileProblem, OSError: there are none in it.
    """
    pem = path.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise FileProblem(f"{path}: holds no certificate in PEM") from None
    return pem


def _pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Private key and certificate, held against each other: gRPC would notice with the first handshake, in silence.

    Raises:
        FileProblem, OSError: they are no pair.
    """
    chain, secret = cert.read_bytes(), key.read_bytes()
    if b"ENCRYPTED" in secret:
        raise FileProblem(f"{key}: has a passphrase; gRPC takes keys without one")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error):
            raise FileProblem(f"{key}: is not the key of the certificate {cert}") from None
        raise FileProblem(f"{cert} and {key}: are no certificate and its private key in PEM") from None
    return secret, chain
