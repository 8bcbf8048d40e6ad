"""The server of the front: uvicorn with our limits for connections, in the process of the command."""

import asyncio
import fcntl
import logging
import socket
import ssl
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.client import AsyncClient
from outrider.environment import loop_factory
from outrider.http.app import create_app
from outrider.http.settings import ServerSettings
from outrider.rpc.auth import ClientLimits, Tokens
from outrider.rpc.channel import check_plaintext, checked_host_and_port, is_local
from outrider.rpc.tls import FileProblem, Watched, certificate_and_key, from_files

_logger = logging.getLogger("outrider.http")

MAX_HEAD_BYTES = 64 * 1024
MAX_CONNECTIONS = 4096
SEND_BUFFER_BYTES = 256 * 1024
_CHECK_S = 1.0
_BACKLOG = 1024


class _OneASecond(logging.Filter):
    """Lets one line a second through: each connection with garbage makes one."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING or time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0
            return True
        return False


_WARNINGS = _OneASecond()


class HttpServer:
    """A front that listens. The socket is bound at once, so that an address in use is found before anything starts.

    Args:
        settings: checked here.
        connect: makes the client, inside the event loop; the server closes it.

    Raises:
        ValueError: the settings contradict each other, a file has the wrong content, the address is not `HOST:PORT`, or
            plaintext or a server without keys would be reachable from other machines.
        OSError: the address cannot be bound.
    """

    def __init__(self, settings: ServerSettings, connect: Callable[[], AsyncClient]) -> None:
        self._settings = settings
        self._connect = connect
        self._certificate = _certificate(settings)
        self._keys, self._limits = _keys(settings), ClientLimits.of(settings, "http-")
        self._socket = _bind(settings.address)
        self._name = self._socket.getsockname()[:2]  # uvicorn closes the socket at its end
        self._server: uvicorn.Server | None = None
        self._is_stopped = False

    @property
    def url(self) -> str:
        """Where it listens, with the real port."""
        host, port = self._name
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serves until a signal, or until `stop`. In the main thread it handles SIGTERM and SIGINT."""
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        """`run`, inside an event loop."""
        settings = self._settings
        async with self._connect() as client:
            config = uvicorn.Config(
                create_app(client, settings, self._keys, self._limits),
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=max(1, round(settings.idle_timeout)),
                timeout_graceful_shutdown=max(1, round(settings.grace)),
            )
            config.load()
            logging.getLogger("uvicorn.error").addFilter(_WARNINGS)  # once, however often
            if self._certificate is not None:
                config.ssl = self._certificate.context
            self._server = uvicorn.Server(config)
            self._server.should_exit = self._is_stopped
            watching = asyncio.create_task(self._watch(self._server))
            try:
                await self._server.serve(sockets=[self._socket])
                if late := self._server.server_state.tasks:
                    await asyncio.wait(late, timeout=_CHECK_S)  # cancelled by uvicorn: each sends an error
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    def stop(self) -> None:
        """Ends `run`, from any thread, once the answers in progress have ended or their grace is over."""
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True

    async def _watch(self, server: uvicorn.Server) -> None:
        """Closes connections that take too long, and takes in new certificates."""
        settings, loop = self._settings, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_CHECK_S, settings.idle_timeout / 4, settings.slow_client_timeout / 4))
            for connection in list(server.server_state.connections):
                if isinstance(connection, _Connection):
                    connection.check(loop.time(), settings.idle_timeout, settings.slow_client_timeout)
            if self._certificate is not None:
                self._certificate.renew()


class FrontEnded(Exception):
    """A front has ended by itself. The text is one line."""


class BackgroundServer:
    """An `HttpServer` in a thread of its own. As a context manager it stops at the end."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-http", daemon=True)

    def _run(self) -> None:
        try:
            self._server.run()
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raises `FrontEnded` if it has ended."""
        if not self._thread.is_alive():
            reason = "" if self._error is None else f": {' '.join(str(self._error).split()) or repr(self._error)}"
            raise FrontEnded(f"the HTTP front at {self._server.url} ended{reason}") from self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
        self._thread.join()


# ------------------------------------------------------------------------------------------------------- connections


class _Connection(HttpToolsProtocol):
    """A connection with limits: for the time until a request's head has arrived, for its size, and for a reader that
    does not read. uvicorn has a time for idle connections alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._quiet_since = self.loop.time()
        self._stuck_since: float | None = None
        self._unread_bytes = 0  # when `check` last counted them
        self._head_bytes = 0
        self._data = self._unread = b""
        self._cycles: list[Any] = []  # of requests without a whole answer, in order

    @property
    def _is_idle(self) -> bool:
        """Whether no request is in progress."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:  # uvicorn tells the last of several requests alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # A body may come in the piece that ends the head: only pieces that did not end it count.
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
            return
        self._unread = data
        while self._unread:
            self._data, self._unread = self._unread, b""
            super().data_received(self._data)
        self._head_bytes = self._head_bytes + len(data) if self._is_idle else 0

    def _should_upgrade(self) -> bool:
        """Whether `handle_websocket_upgrade` takes the request."""
        return bool(self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT")

    def handle_websocket_upgrade(self) -> None:
        """Reads a request that asks for an upgrade again, as one that does not: httptools would drop its body. Java's
        HttpClient asks for HTTP/2 with its requests in plaintext, and takes an answer in HTTP/1.1.
        """
        paused: Any = sys.exception()  # of the parser, with the length of the head
        head = [f"{self.scope['method']} ".encode(), self.url, f" HTTP/{self.scope['http_version']}\r\n".encode()]
        head += [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self._unread = b"".join([*head, b"\r\n", self._data[paused.args[0] :]])
        self.parser = type(self.parser)(self)  # the old one reads no more after `Connection: close`

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._should_upgrade():
            return
        cycle: Any = self.cycle
        self._cycles.append(cycle)
        if self.scope["http_version"] == "1.0":
            send, cycle.chunked_encoding = cycle.send, False

            async def unchunked(message: Any) -> None:
                # No promised length: the answer ends with the connection.
                cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            cycle.send = unchunked

    def on_response_complete(self) -> None:
        super().on_response_complete()
        del self._cycles[:1]
        self._quiet_since, self._head_bytes = self.loop.time(), 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_since = None

    def _count_unread(self) -> int:
        """Bytes of answers that the client's side has not taken. Those in the kernel count: it takes more only once a
        third of its buffer is free.
        """
        count = int(self.transport.get_write_buffer_size())
        with suppress(OSError):  # not on every platform
            queued = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
            count += int.from_bytes(queued, sys.byteorder)
        return count

    def check(self, now: float, idle_timeout: float, slow_client_timeout: float) -> None:
        """Closes the connection if it has taken too long."""
        if self._stuck_since is not None and (count := self._count_unread()) != self._unread_bytes:
            self._stuck_since, self._unread_bytes = now, count  # the client is slow, but reads
        is_quiet = self._is_idle and now - self._quiet_since > idle_timeout
        is_stuck = self._stuck_since is not None and now - self._stuck_since > slow_client_timeout
        if is_stuck and not is_quiet:
            _logger.warning("a client has read nothing for %g s; its connection is closed", slow_client_timeout)
        if is_quiet or is_stuck:
            self.transport.abort()


# ---------------------------------------------------------------------------------------------------------- settings


class _Certificate:
    """The TLS context of a listener, whose files are read again when they change."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._files = cert, key
        self._watched = Watched([cert, key], lambda: _context(cert, key))  # fails if they do not match
        self._version, self.context = self._watched.look()

    def renew(self) -> None:
        """Uses the files as they are now, for new connections."""
        version, _ = self._watched.look()
        if version != self._version:
            self._version = version
            with suppress(OSError):  # replaced again this moment: the next check sees it
                self.context.load_cert_chain(*self._files)


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty passphrase: without one OpenSSL would ask for it at the terminal.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError:
        raise FileProblem(f"{cert} and {key}: not a PEM certificate and its private key without a passphrase") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _certificate(settings: ServerSettings) -> _Certificate | None:
    files = certificate_and_key("--http-tls-cert", settings.tls_cert, "--http-tls-key", settings.tls_key)
    return None if files is None else from_files("--http-tls-cert, --http-tls-key", lambda: _Certificate(*files))


def _keys(settings: ServerSettings) -> Tokens | None:
    """The keys of clients, after the checks that plaintext and a front without keys stay on this machine."""
    is_plain, path = settings.tls_cert is None, settings.key_file
    if is_plain and not settings.plaintext:
        try:
            check_plaintext(settings.address, "give --http-tls-cert and --http-tls-key, or --http-plaintext")
        except ValueError as error:
            raise ValueError(f"--http {error}") from None
    if path is None and not settings.plaintext and not is_local(settings.address):
        raise ValueError(
            f"--http {settings.address} is not a loopback address, and without keys anyone may call: give "
            "--http-key-file, or --http-plaintext if the network is trusted"
        )
    return None if path is None else from_files("--http-key-file", lambda: Tokens(path))


def _bind(address: str) -> socket.socket:
    try:
        host, _, port = checked_host_and_port(address, least_port=0).rpartition(":")
    except ValueError as error:
        raise ValueError(f"--http: {error}") from None
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=_BACKLOG)
    # Connections inherit it. By default the kernel would keep megabytes for each client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener
