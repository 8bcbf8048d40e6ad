"""TLS of listeners and of channels, from PEM files that are read again when they change.

A server checks its files before each handshake. A channel keeps its first ones; `outrider.rpc.channel` replaces the
channel. A check is one `stat` for each file, from any thread.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

_logger = logging.getLogger(__name__)

Value = TypeVar("Value")
_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]

# A file that changes while it is read is read again, this often at most.
_READS = 5


class FileProblem(ValueError):
    """A file cannot be read, or has the wrong content. The text is one line that names the file."""


class SettingsError(ValueError):
    """A setting that this machine cannot meet; the text is one line that names the flag."""


def from_files(flag: str, make: Callable[[], Value]) -> Value:
    """Returns the result of `make`, which reads files.

    Raises:
        SettingsError: a file cannot be read; with the flag.
    """
    try:
        return make()
    except FileProblem as problem:
        raise SettingsError(f"{flag}: {problem}") from problem


def certificate_and_key(cert_flag: str, cert: Path | None, key_flag: str, key: Path | None) -> tuple[Path, Path] | None:
    """A certificate and its key; None if neither is given.

    Raises:
        SettingsError: only one is given.
    """
    if cert is not None and key is not None:
        return cert, key
    if cert is not None or key is not None:
        given, missing = (cert_flag, key_flag) if cert is not None else (key_flag, cert_flag)
        raise SettingsError(f"{given} needs {missing}")
    return None


class Watched(Generic[Value]):
    """A value that is read from files, and again when they change.

    After a change that cannot be read (a file is gone, a certificate is newer than its key) the last value stays in
    use, with one line in the log, until the next change.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        """`read` returns the value of the files at `paths`, or raises `FileProblem` or `OSError`.

        Raises:
            FileProblem: the files cannot be read now.
        """
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamp, self._value = self._load()
        self._seen: _Stamp | None = self._stamp  # of the last check, also if it could not be read
        self._version = 0

    def look(self) -> tuple[int, Value]:
        """The number of changes so far, and the value."""
        with self._lock:
            stamp = self._look()
            if stamp != self._seen:
                self._seen = stamp
                self._renew()
            return self._version, self._value

    def _renew(self) -> None:
        try:
            stamp, value = self._load()
        except FileProblem as problem:
            _logger.warning("%s; the last valid content stays in use", problem)
            return
        self._seen = stamp
        if stamp != self._stamp:
            self._stamp, self._value = stamp, value
            self._version += 1
            _logger.info("files reloaded: %s", ", ".join(map(str, self._paths)))

    def _load(self) -> tuple[_Stamp, Value]:
        """Reads until no file has changed meanwhile: an old certificate and a new key are no pair."""
        problem: FileProblem | None = None
        for _ in range(_READS):
            before, problem = self._look(), None
            try:
                value = self._read()
            except OSError as error:
                problem = FileProblem(
                    f"{error.filename or ', '.join(map(str, self._paths))}: {error.strerror or error}"
                )
            except FileProblem as error:
                problem = error
            if before is not None and self._look() == before:
                if problem is not None:
                    raise problem
                return before, value
            if before is None:
                break
        raise problem or FileProblem(
            f"{', '.join(map(str, self._paths))}: changed during each of {_READS} reads; try again"
        )

    def _look(self) -> _Stamp | None:
        """Changes when a file does; None if a file is missing."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


@dataclass(frozen=True, slots=True)
class TLS:
    """TLS settings of a channel.

    Attributes:
        ca: PEM file of the CA certificates for the server; None: the public ones that come with gRPC.
        cert: PEM file of the client certificate and its chain, if the server requires one.
        key: PEM file of its private key, without a passphrase.
        name: the name that the server's certificate must have; None: the host of the address.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    name: str | None = None


class ChannelTLS:
    """Credentials of channels, from the files as they are now.

    Raises:
        FileProblem: a file is missing or has the wrong content, or only one of certificate and key is given.
    """

    def __init__(self, tls: TLS) -> None:
        self.name = tls.name
        ca, cert, key = (None if path is None else Path(path) for path in (tls.ca, tls.cert, tls.key))
        if (cert is None) != (key is None):
            raise FileProblem("only one of certificate and key is given; give both")

        def read() -> grpc.ChannelCredentials:
            roots = None if ca is None else _authority(ca)
            secret, chain = (None, None) if cert is None or key is None else _pair(cert, key)
            return grpc.ssl_channel_credentials(roots, secret, chain)

        self._watched = Watched([path for path in (ca, cert, key) if path is not None], read)

    def look(self) -> tuple[int, grpc.ChannelCredentials]:
        """The number of changes of the files so far, and the credentials."""
        return self._watched.look()


class ServerTLS:
    """Credentials of a listener. With a `client_ca` a handshake requires a client certificate of that CA.

    Raises:
        FileProblem: a file is missing or has the wrong content.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        def read() -> Any:
            return grpc.ssl_server_certificate_configuration(
                [_pair(cert, key)], root_certificates=None if client_ca is None else _authority(client_ca)
            )

        paths = (cert, key) if client_ca is None else (cert, key, client_ca)
        self._watched = Watched(paths, read)
        self.requires_client_certificate = client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Server credentials; make new ones for each port."""
        shown, first = self._watched.look()

        def fetch() -> Any:
            """Called by gRPC, on a thread of its own, before each handshake; None is no change."""
            nonlocal shown
            version, configuration = self._watched.look()
            if version == shown:
                return None
            shown = version
            return configuration

        # With a CA alone, clients without a certificate are accepted: authentication must be required as well.
        return grpc.dynamic_ssl_server_credentials(
            first, fetch, require_client_authentication=self.requires_client_certificate
        )


async def speaks_tls(address: str, timeout: float = 2.0) -> bool:
    """Whether a listener at `HOST:PORT` answers a TLS handshake; any certificate will do. False for a Unix socket."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC's servers require it
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, ValueError):  # TimeoutError and SSLError are OSErrors
        return False
    writer.transport.abort()
    return True


def _authority(path: Path) -> bytes:
    """The certificates of a CA file."""
    pem = path.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise FileProblem(f"{path}: has no PEM certificate") from None
    return pem


def _pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Private key and certificate chain, checked against each other: gRPC would fail in each handshake, unlogged."""
    chain, secret = cert.read_bytes(), key.read_bytes()
    if b"ENCRYPTED" in secret:
        raise FileProblem(f"{key}: has a passphrase; remove it, since gRPC reads keys without one only")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error):
            raise FileProblem(f"{key}: is not the key of the certificate {cert}") from None
        raise FileProblem(f"{cert} and {key}: not a PEM certificate and its private key") from None
    return secret, chain
