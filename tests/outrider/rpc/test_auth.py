"""Authentication by certificate names and tokens, and limits per client, over real connections."""

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc import errors
from outrider.rpc.auth import (
    Authentication,
    ClientLimits,
    OwnToken,
    Tokens,
    count_sequences,
)
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import Ending, RequestError
from outrider.rpc.tls import TLS, ChannelTLS, FileProblem, ServerTLS
from tests.certificates import Authority, write
from tests.outrider.rpc.probe import BAD, Probe, both, many, once, serving

TOKENS = FIRST, SECOND = "first-token-0123456789", "second.token~0123456789=="
ALLOWED = ("draft.models.svc", "spiffe://models/ns/drafts")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the clients\n{FIRST}\n\n  {SECOND}\n")
    return path


@pytest.fixture
def tokens(file: Path) -> Tokens:
    return Tokens(file)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@asynccontextmanager
async def guarded(authority: Authority, auth: Authentication, probe: Probe) -> AsyncIterator[str]:
    """The probe behind authentication, over mutual TLS."""
    server = authority.issue("127.0.0.1")
    async with serving(
        probe, first=[auth], credentials=ServerTLS(server.cert, server.key, authority.pem).credentials()
    ) as address:
        yield address


def channel_of(address: str, authority: Authority, *names: str) -> grpc.aio.Channel:
    """A channel of a client with a certificate of these names."""
    client = authority.issue(*names)
    tls = ChannelTLS(TLS(authority.pem, client.cert, client.key))
    return open_channel(address, credentials=tls.look()[1])


async def refusal(call: Any) -> RequestError:
    async def read_all() -> None:
        async for _ in call:
            pass

    ending = Ending(call)  # a write that meets the refusal has an error of its own
    with pytest.raises(grpc.RpcError):
        await (read_all() if hasattr(call, "__aiter__") else call)
    return errors.from_rpc_error(await ending.status())


def every(message: bytes, before: Sequence[bytes] = ()) -> list[tuple[Callable[..., Any], Any]]:
    """The probe's methods, each with this message as its request, or at the end of a stream of them."""
    return [(once, message), (many, message), (both, iter([*before, message]))]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


# ----------------------------------------------------------------------------------------------- certificate names


@pytest.mark.parametrize("names", [ALLOWED[:1], ALLOWED[1:], ("other.models.svc", ALLOWED[0]), ("cn:x", ALLOWED[1])])
async def test_a_client_with_an_allowed_name_is_admitted(authority: Authority, names: tuple[str, ...]) -> None:
    auth = Authentication(allowed=ALLOWED)
    async with guarded(authority, auth, Probe()) as address, channel_of(address, authority, *names) as channel:
        assert await once(channel)(b"x", timeout=60) == b"x"


@pytest.mark.parametrize(
    "names",
    [
        ("models.svc", "draft.models.svc.evil.example", "a.draft.models.svc", "*.models.svc", "DRAFT.models.svc"),
        ("spiffe://models/ns/drafts/x", "spiffe://models/ns"),
        ("cn:draft.models.svc", "127.0.0.1"),  # the subject is not a subjectAltName
    ],
)
async def test_a_client_of_the_ca_without_an_allowed_name_is_refused(
    authority: Authority, names: tuple[str, ...]
) -> None:
    probe, auth = Probe(), Authentication(allowed=ALLOWED)
    async with guarded(authority, auth, probe) as address, channel_of(address, authority, *names) as channel:
        for method, request in every(b"0"):
            error = await refusal(method(channel)(request, timeout=60))
            assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    seen = [name for name in names if not name.startswith(("cn:", "127."))]
    names_seen, names_allowed = ", ".join(seen) or "no DNS name and no URI", ", ".join(ALLOWED)
    assert f"names {names_seen}; --allow-client-san of the service allows {names_allowed}" in error.message
    assert error.metadata == {"seen": ", ".join(seen), "allowed": ", ".join(ALLOWED)}
    assert probe.started == 0
    assert {code.name: count for code, count in auth.refused.items() if count} == {
        "PERMISSION_DENIED": len(every(b"0"))
    }


async def test_a_client_without_a_certificate_is_refused() -> None:
    """The list of names holds even without TLS."""
    auth = Authentication(allowed=ALLOWED)
    async with serving(Probe(), first=[auth]) as address, open_channel(address) as channel:
        error = await refusal(once(channel)(b""))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert "the client has no certificate" in error.message


async def test_health_is_open_to_all_and_reflection_is_not(authority: Authority) -> None:
    auth = Authentication(allowed=ALLOWED)
    async with guarded(authority, auth, Probe()) as address, channel_of(address, authority, "other") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=60)).status == 1
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        error = await refusal(reflection.ServerReflectionInfo(requests, timeout=60))
        assert error.code is grpc.StatusCode.PERMISSION_DENIED


# ------------------------------------------------------------------------------------------------------------ tokens


async def test_every_call_needs_a_token(tokens: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe()
    async with serving(probe, first=[Authentication(tokens=tokens)]) as address, open_channel(address) as channel:
        for token in TOKENS:
            assert await once(channel)(b"x", metadata=bearer(token)) == b"x"
            assert [answer async for answer in many(channel)(b"0", metadata=bearer(token))] == [b"first", b"last"]
        for metadata in ((), bearer(FIRST[:-1])):
            for method, request in [*every(b"0"), *every(BAD)]:
                error = await refusal(method(channel)(request, metadata=metadata))
                assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert (probe.started, probe.decoded) == (4, 4), "a refused request is not decoded either"
    assert "was refused: UNAUTHENTICATED" in caplog.text
    assert FIRST[:-1] not in caplog.text


async def test_a_message_that_cannot_be_decoded_is_an_invalid_argument(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Probe()) as address, open_channel(address) as channel:
        for method, request in every(BAD, before=[b"x"]):
            error = await refusal(method(channel)(request, timeout=60))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert error.message == "the message of 1 byte cannot be decoded: Error parsing message"
        health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert (await refusal(health(BAD * 4, timeout=60))).code is grpc.StatusCode.INVALID_ARGUMENT
        reflection: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert (await refusal(reflection(iter([BAD * 4]), timeout=60))).code is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


async def test_an_allowed_name_and_a_token_are_both_needed(authority: Authority, tokens: Tokens) -> None:
    auth = Authentication(allowed=ALLOWED, tokens=tokens)
    async with guarded(authority, auth, Probe()) as address:
        async with channel_of(address, authority, ALLOWED[0]) as channel:
            assert (await refusal(once(channel)(b"x", timeout=60))).code is grpc.StatusCode.UNAUTHENTICATED
            assert await once(channel)(b"x", metadata=bearer(FIRST), timeout=60) == b"x"
        async with channel_of(address, authority, "other") as channel:
            error = await refusal(once(channel)(b"x", metadata=bearer(FIRST), timeout=60))
            assert error.code is grpc.StatusCode.PERMISSION_DENIED


def check(tokens: Tokens, *values: str) -> str:
    return tokens.check([("user-agent", "test"), *(("authorization", value) for value in values)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(
            ([f"Bearer {token}"], "not in the service's --auth-token-file")
            for token in (FIRST[:-1], FIRST + "0", FIRST.upper(), "", "# of the clients", "é" * 20)
        ),
        ([], "has no token"),
        ([FIRST], "must be one value, 'Bearer TOKEN'"),
        ([f"Basic {FIRST}"], "must be one value, 'Bearer TOKEN'"),
        ([f"Bearer {FIRST}", f"Bearer {SECOND}"], "must be one value, 'Bearer TOKEN'"),
    ],
)
def test_any_other_token_is_refused_and_not_repeated(tokens: Tokens, values: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check(tokens, *values)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert not any(value[7:] in str(caught.value) for value in values if len(value) > 8)


def test_an_invalid_file_changes_nothing_and_is_logged_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(file)
    with caplog.at_level(logging.DEBUG):
        for content in (b"", b"# all of them are gone\n", b"too-short\n", b"not a token, but some words\n"):
            write(file, content)
            assert check(tokens, f"Bearer {FIRST}")
        file.unlink()
        assert check(tokens, f"Bearer {FIRST}")
        assert check(tokens, f"Bearer {FIRST}")
    assert len(caplog.records) == 5, "a line for each change, and not for each call"
    assert "too-short" not in caplog.text
    assert "some words" not in caplog.text
    write(file, f"{SECOND}\n".encode())
    with pytest.raises(RequestError):
        check(tokens, f"Bearer {FIRST}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no token; write"),
        (b"fifteen-letters\n", "line 1 has 15 characters; a token has at least 16"),
        (f"{FIRST}\n\nsome words that are no token\n".encode(), "line 3 is not a token"),
        ("ünïcödé-tokens-are-none".encode(), "not ASCII text"),
    ],
)
def test_a_file_without_tokens_is_refused_at_the_start(file: Path, content: bytes, message: str) -> None:
    write(file, content)
    for kind in (Tokens, OwnToken):
        with pytest.raises(FileProblem, match=message):
            kind(file)


# ------------------------------------------------------------------------------------------------------------ limits


async def hold(channel: grpc.aio.Channel, token: str = "") -> Any:
    """A call in progress."""
    call = both(channel)(metadata=bearer(token) if token else (), timeout=60)
    await call.write(b"x")
    assert await call.read() == b"x"
    return call


async def test_calls_are_limited_for_each_token_or_else_for_each_address(tokens: Tokens) -> None:
    by_token = Authentication(tokens=tokens, limits=ClientLimits(max_sequences=1))
    async with serving(Probe(), first=[by_token]) as address, open_channel(address) as channel:
        held = [await hold(channel, token) for token in TOKENS]
        for token in TOKENS:
            error = await refusal(many(channel)(b"0", metadata=bearer(token)))
            assert (error.code, error.metadata["limit"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "max-client-sequences")
        assert not any(call.done() for call in held)
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection, and so a port, of its own
    async with (
        serving(Probe(), first=[Authentication(limits=ClientLimits(max_sequences=1))]) as address,
        open_channel(address) as first,
        open_channel(address, options=own) as second,
    ):
        call = await hold(first)
        assert (await refusal(many(second)(b"0"))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await once(second)(b"x") == b"x", "unary calls are no sequences"
        assert not call.done()


@pytest.mark.parametrize("allowed", [(), ALLOWED])
async def test_calls_are_limited_for_each_name_of_a_certificate(authority: Authority, allowed: Sequence[str]) -> None:
    """Whether or not names are required."""
    auth = Authentication(allowed=allowed, limits=ClientLimits(max_sequences=1))
    async with (
        guarded(authority, auth, Probe()) as address,
        channel_of(address, authority, ALLOWED[0]) as first,
        channel_of(address, authority, ALLOWED[1]) as second,
    ):
        held = [await hold(channel) for channel in (first, second)]
        for channel in (first, second):
            assert (await refusal(many(channel)(b"0"))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in held)


def assert_refused(limits: ClientLimits) -> RequestError:
    with pytest.raises(RequestError) as caught, limits.enter("a"):
        pass
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    return caught.value


def test_a_burst_passes_and_then_calls_at_the_rate() -> None:
    now = [100.0]
    limits = ClientLimits(rate=4, burst=3, clock=lambda: now[0])
    for pause in (0.0, 1000.0):  # a long pause saves up one burst, and no more
        now[0] += pause
        for _ in range(3):
            with limits.enter("a"):
                pass
        for _ in range(20):
            assert_refused(limits)
            now[0] += 0.25
            with limits.enter("a"):
                pass


def test_each_sample_of_a_call_takes_of_the_rate() -> None:
    limits = ClientLimits(rate=1, burst=4, clock=lambda: 100.0)
    with limits.enter("a"):
        count_sequences("n", 4)
    assert_refused(limits)


@pytest.mark.parametrize("how", [{"rate": 0.001, "burst": 1}, {"max_sequences": 1}])
def test_many_other_clients_do_not_reset_a_limit(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of a client without calls in progress, nor that of one with some."""
    monkeypatch.setattr("outrider.rpc.auth._KEPT", 8)
    limits = ClientLimits(**how, clock=lambda: 100.0)
    with ExitStack() as active:
        active.enter_context(limits.enter("a"))
        if "rate" in how:
            active.close()
        for number in range(20):
            with limits.enter(str(number)):
                pass
        assert_refused(limits)


def test_an_infinite_rate_is_no_limit() -> None:
    limits = ClientLimits(rate=math.inf, max_sequences=1)
    for _ in range(100):
        with limits.enter("a"):
            assert_refused(limits)


def test_concurrent_calls_are_bounded_and_released_however_they_end() -> None:
    limits = ClientLimits(max_sequences=2)
    for _ in range(3):
        with suppress(ZeroDivisionError), limits.enter("a"), limits.enter("a"):
            error = assert_refused(limits)
            assert error.message == (
                "this client has 2 sequences in progress and starts 1 more; at most 2 (--max-client-sequences): "
                "try again when some have ended"
            )
            assert error.metadata == {"limit": "max-client-sequences", "given": "3", "maximum": "2"}
            raise ZeroDivisionError


def test_each_sample_of_a_call_counts_as_a_sequence_until_the_call_ends() -> None:
    limits = ClientLimits(max_sequences=4)
    with limits.enter("a"):
        count_sequences("n", 3)
        with limits.enter("a"):
            assert_refused(limits)
            with pytest.raises(RequestError) as caught:
                count_sequences("n", 2)
            assert caught.value.metadata == {"limit": "max-client-sequences", "given": "5", "maximum": "4"}
    with limits.enter("a"):
        count_sequences("n", 4)
        assert_refused(limits)
    with limits.enter("a"), pytest.raises(RequestError) as caught:
        count_sequences("n", 5)  # never possible: a retry would not help
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.metadata == {"field": "n", "given": "5", "maximum": "4"}
