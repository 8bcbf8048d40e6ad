"""Authentication and rate limits: bearer tokens, client certificates, and how many sequences one client may have.

Tokens appear in no log and in no message; a server keeps only their digests. The TLS handshake checks a certificate
against the CA; this module checks its names against a list. A call counts as one sequence before its request is
decoded; `count_sequences` adds those of further samples. Health checks need no token; reflection does.
"""

import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from outrider.rpc import errors
from outrider.rpc.errors import RequestError, above_limit, counted, overloaded, permission_denied, unauthenticated
from outrider.rpc.interceptor import Context, Handler, Interceptor, wrapped
from outrider.rpc.tls import FileProblem, SettingsError, Watched

METADATA_KEY = "authorization"
_SCHEME = "bearer "

# Shorter tokens can be guessed; the alphabet is that of RFC 6750.
LEAST_CHARS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Tokens:
    """The tokens that a server accepts: one a line, without empty lines and lines that begin with `#`.

    Raises:
        FileProblem: the file cannot be read, has no token, or a line that is not a token.
    """

    def __init__(self, path: Path) -> None:
        self._watched = Watched([path], lambda: tuple(map(_digest, _read(path))))

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The name of the token that a call carries: a digest, constant for as long as the token.

        The time does not depend on how many characters are right, nor on which token it is.

        Raises:
            RequestError: UNAUTHENTICATED: no token, or one that is not in the file.
        """
        given = [value for key, value in metadata if key == METADATA_KEY]
        if not given:
            raise unauthenticated(
                "the call has no token; send one as 'authorization: Bearer TOKEN' (--token-file, in Python token_file, "
                "of a draft service --verifier-token-file)"
            )
        text = given[0] if isinstance(given[0], str) else given[0].decode("latin-1")
        if len(given) > 1 or not text.lower().startswith(_SCHEME):
            raise unauthenticated("the call's 'authorization' must be one value, 'Bearer TOKEN'")
        sent = _digest(text[len(_SCHEME) :])
        found = ""
        for digest in self._watched.look()[1]:
            if hmac.compare_digest(digest, sent):
                found = f"token {hashlib.sha256(digest).hexdigest()[:16]}"
        if not found:
            raise unauthenticated("the call's token is not in the service's --auth-token-file; send another one")
        return found


class OwnToken:
    """The token that a client sends: the first one of its file.

    Raises:
        FileProblem: the file cannot be read, or has no token.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self._watched = Watched([file], lambda: _read(file)[0])

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((METADATA_KEY, f"Bearer {self._watched.look()[1]}"),)


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError:
        raise FileProblem(f"{path}: is not ASCII text") from None
    tokens = {number: token for number, line in enumerate(lines, 1) if (token := line.strip()) and token[0] != "#"}
    if not tokens:
        raise FileProblem(f"{path}: has no token; write one token a line")
    for number, token in tokens.items():
        if len(token) < LEAST_CHARS:
            raise FileProblem(f"{path}: line {number} has {len(token)} characters; a token has at least {LEAST_CHARS}")
        if not _TOKEN.fullmatch(token):
            raise FileProblem(
                f"{path}: line {number} is not a token: use letters, digits and . _ ~ + / -, and = at the end only"
            )
    return list(tokens.values())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


# gRPC's keys for the names in a certificate's subjectAltName. IP and e-mail addresses do not identify clients here.
_KINDS = ("peer_uri", "peer_dns")
_SHOWN = 8  # names in a message at most


def names_of(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The URI and DNS names in the peer's certificate; none without a certificate."""
    return tuple(name.decode("utf-8", "replace") for kind in _KINDS for name in auth_context.get(kind, ()))


def allowed_name(allowed: Collection[str], auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The first allowed name in the peer's certificate. Names are compared letter for letter.

    Raises:
        RequestError: UNAUTHENTICATED: no certificate; PERMISSION_DENIED: no allowed name in it.
    """
    if not auth_context.get("x509_pem_cert"):
        raise unauthenticated("the client has no certificate; give it one of the service's --tls-client-ca")
    seen = names_of(auth_context)
    for name in seen:
        if name in allowed:
            return name
    shown = _listed(sorted(allowed))
    raise permission_denied(
        f"the client's certificate names {_listed(seen) or 'no DNS name and no URI'}; --allow-client-san of the "
        f"service allows {shown}",
        seen=_listed(seen),
        allowed=shown,
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


LONGEST_WAIT = 60.0
# Clients kept; beyond that, idle clients with a full bucket are dropped.
_KEPT = 1024


class ClientLimits:
    """The limits of each client."""

    def __init__(
        self,
        *,
        rate: float | None = None,
        burst: int | None = None,
        max_sequences: int | None = None,
        prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            rate: sequences a second on average; None or infinite: no limit.
            burst: sequences that may start at once after a pause; None: `rate`, at least 1.
            max_sequences: sequences in progress; None: no limit.
            prefix: of the flags, as errors name them.
        """
        self._rate = rate = None if rate == math.inf else rate
        self._burst = max(1, round(rate or 0)) if burst is None else burst
        self._max_sequences = max_sequences
        self._prefix = prefix
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    @classmethod
    def of(cls, settings: Any, prefix: str = "") -> Self | None:
        """The limits by `client_rate`, `client_burst` and `max_client_sequences` of the settings; None without any.

        Raises:
            SettingsError: a burst without a rate.
        """
        rate, burst, most = settings.client_rate, settings.client_burst, settings.max_client_sequences
        if rate is not None or most is not None:
            return cls(rate=rate, burst=burst, max_sequences=most, prefix=prefix)
        if burst is not None:
            raise SettingsError(f"--{prefix}client-burst needs --{prefix}client-rate")
        return None

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Counts a call of a client, while it is open, as one sequence and those that `count_sequences` adds.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: the client has too many sequences in progress, or starts them too fast;
                with the time to wait.
        """
        client = self._client(name)
        self._check_limit(client, 1)
        if self._rate is not None:
            self._take(client, self._rate)
        client.sequences += 1
        call = _Call(self, client)
        _call.set(call)  # each call is a task of its own, and so has a context of its own
        try:
            yield
        finally:
            client.sequences -= call.sequences

    def add(self, call: "_Call", field: str, count: int) -> None:
        most = self._max_sequences
        if most is not None and count > most:
            advice = f", the sequences of one client at once (--{self._prefix}max-client-sequences)"
            raise above_limit(field, count, most, advice)
        more = max(0, count - call.sequences)
        self._check_limit(call.client, more)
        if self._rate is not None:
            call.client.level -= more  # may go below 0: calls with more samples than a burst are admitted
        call.client.sequences += more
        call.sequences += more

    def _check_limit(self, client: "_Client", more: int) -> None:
        most = self._max_sequences
        if most is not None and client.sequences + more > most:
            raise overloaded(
                f"this client has {counted(client.sequences, 'sequence')} in progress and starts {more} more; at most "
                f"{most} (--{self._prefix}max-client-sequences): try again when some have ended",
                limit="max-client-sequences",
                given=client.sequences + more,
                maximum=most,
            )

    def _take(self, client: "_Client", rate: float) -> None:
        client.refill(self._clock(), rate, self._burst)
        if client.level >= 1:
            client.level -= 1
            return
        # Each refused call waits one interval more, so that they do not all retry at once.
        seconds = min((1 - client.level + client.refused) / rate, LONGEST_WAIT)
        client.refused += 1
        raise overloaded(
            f"this client starts more than {rate:g} sequences a second (--{self._prefix}client-rate), or {self._burst} "
            f"at once (--{self._prefix}client-burst); try again in about {seconds:.2g} s",
            retry_after=seconds,
            limit="client-rate",
            rate=f"{rate:g}",
            burst=self._burst,
        )

    def _client(self, name: str) -> "_Client":
        if name not in self._clients:
            if len(self._clients) >= _KEPT:
                self._forget()
            self._clients[name] = _Client(self._burst, self._clock())
        return self._clients[name]

    def _forget(self) -> None:
        """Drops clients without a sequence in progress and with a full bucket."""
        now = self._clock()
        for client in self._clients.values():
            client.refill(now, self._rate or 1.0, self._burst)
        self._clients = {
            name: each for name, each in self._clients.items() if each.sequences or each.level < self._burst
        }


class _Client:
    """One client: its bucket, its sequences in progress, and how many calls were refused lately."""

    def __init__(self, level: float, now: float) -> None:
        self.level = level
        self.sequences = 0
        self.refused = 0.0
        self._now = now

    def refill(self, now: float, rate: float, burst: int) -> None:
        more = (now - self._now) * rate
        self.level = min(self.level + more, burst)
        self.refused = max(0.0, self.refused - more)
        self._now = now


@dataclass(slots=True)
class _Call:
    """One call of a client, and how many sequences it counts as."""

    limits: ClientLimits
    client: _Client
    sequences: int = 1


_call: ContextVar[_Call | None] = ContextVar("call", default=None)
_caller: ContextVar[str] = ContextVar("caller", default="")


def count_sequences(field: str, count: int) -> None:
    """Counts the call in progress as `count` sequences of its client until it ends, if the server limits them.

    Raises:
        RequestError: INVALID_ARGUMENT with `field`: above the limit; RESOURCE_EXHAUSTED: above it with the client's
            others.
    """
    if (call := _call.get()) is not None:
        call.limits.add(call, field, count)


def caller(context: Context) -> str:
    """Who makes the call in progress, as the limits know clients: by token, else certificate, else address."""
    return _caller.get() or _anonymous(context)


def _anonymous(context: Context) -> str:
    certificate: Any = context.auth_context()
    if names := names_of(certificate):
        return names[0]
    peer = context.peer()  # without its port, `ipv4:1.2.3.4:567`, which differs between connections
    return peer if peer.startswith("unix") else peer.rpartition(":")[0] or peer


_logger = logging.getLogger(__name__)

# Streaming calls that start no sequence.
_FREE = ("/grpc.reflection.", "/vllm.grpc.engine.VllmEngine/GetTokenizer")
# Between two log lines about refused calls: a client that retries in a loop must not fill the disk.
_SECONDS_PER_LINE = 1.0


REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
"""The status codes of the calls that `Authentication` refuses: no token, the wrong name, a limit of the client."""


class Authentication(Interceptor):
    """Authenticates and limits callers. The first interceptor, so that refused callers learn nothing else.

    Attributes:
        refused: how many calls it refused, by status code.
    """

    exempt = ("/grpc.health.",)

    def __init__(
        self, *, allowed: Collection[str] = (), tokens: Tokens | None = None, limits: ClientLimits | None = None
    ) -> None:
        """
        Args:
            allowed: names, of which a client's certificate must have one; empty: any client.
            tokens: of which each call must carry one; None: no token is required.
            limits: of each client, identified by its token, else its certificate, else its address. Only streaming
                calls that start sequences count, as one each unless `count_sequences` adds more.
        """
        self._allowed = frozenset(allowed)
        self._tokens = tokens
        self._limits = limits
        self._next_line = 0.0
        self.refused = dict.fromkeys(REFUSALS, 0)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        method: Any = details.method
        metadata = tuple(details.invocation_metadata or ())
        counts = bool(handler.response_streaming) and not method.startswith(_FREE)

        @asynccontextmanager
        async def around(context: Context) -> AsyncIterator[None]:
            with ExitStack() as inside:
                try:
                    name = self._name(context, metadata)
                    _caller.set(name)  # each call is a task of its own, and so has a context of its own
                    if counts and self._limits is not None:
                        inside.enter_context(self._limits.enter(name))
                except RequestError as error:
                    self._note(method, context, error)
                    await errors.abort(context, error)
                yield

        return wrapped(handler, around)

    def _name(self, context: Context, metadata: Any) -> str:
        """Authenticates the caller. Returns its name in the limits."""
        name = allowed_name(self._allowed, context.auth_context()) if self._allowed else ""
        token = "" if self._tokens is None else self._tokens.check(metadata)
        return token or name or _anonymous(context)

    def _note(self, method: str, context: Context, error: RequestError) -> None:
        self.refused[error.code] += 1
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _SECONDS_PER_LINE
            _logger.warning("%s from %s was refused: %s: %s", method, context.peer(), error.code.name, error.message)
