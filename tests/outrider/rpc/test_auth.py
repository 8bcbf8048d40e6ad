"""Who is let in over real connections: by the names of its certificate, by its token, and no more often than it may."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc import errors
from outrider.rpc.auth import LEAST_CHARS, AllowedClients, Authentication, ClientLimits, OwnToken, Tokens, address_of
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import RequestError
from outrider.rpc.server import _gates, bind, create_server
from outrider.rpc.timeouts import Ending
from outrider.rpc.tls import TLS, ChannelTLS, FileProblem, ServerTLS
from tests.certificates import Authority, write
from tests.outrider.rpc.probe import BAD, Probe, both, many, once, serving, written

TOKENS = ("token-of-one-client", "token-of-another-client")
ALLOWED = ("draft.models.svc", "spiffe://models/ns/drafts")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    path = tmp_path / "tokens"
    path.write_text("\n".join(TOKENS))
    return Tokens(path)


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
    ending = Ending(call)  # a write that meets the refusal has an error of its own
    with pytest.raises(grpc.RpcError):
        await (_read_to_its_end(call) if hasattr(call, "__aiter__") else call)
    return errors.from_rpc_error(await ending.status())


def every(message: bytes, before: Sequence[bytes] = ()) -> list[tuple[Callable[..., Any], Any]]:
    """The probe's methods, each with this message as its request, or at the end of a stream of them."""
    return [(once, message), (many, message), *((method, iter([*before, message])) for method in (both, written))]


async def _read_to_its_end(call: Any) -> None:
    async for _ in call:
        pass


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("names", [ALLOWED[:1], ALLOWED[1:], ("other.models.svc", ALLOWED[0]), ("cn:x", ALLOWED[1])])
async def test_a_client_that_is_named_comes_in(authority: Authority, names: tuple[str, ...]) -> None:
    auth = Authentication(allowed=AllowedClients(ALLOWED))
    async with (
        guarded(authority, auth, Probe()) as address,
        channel_of(address, authority, *names) as channel,
    ):
        assert await once(channel)(b"x", timeout=60) == b"x"
        assert [answer async for answer in both(channel)(iter([b"x"]), timeout=60)] == [b"x"]


@pytest.mark.parametrize(
    "names",
    [
        ("other.models.svc",),
        ("models.svc", "draft.models.svc.evil.example", "a.draft.models.svc", "*.models.svc", "DRAFT.models.svc"),
        ("spiffe://models/ns/drafts/x", "spiffe://models/ns"),
        ("cn:draft.models.svc",),  # a subject is no name that a CA vouches for in this way
        ("cn:draft.models.svc", "127.0.0.1"),
    ],
)
async def test_a_client_of_the_ca_that_is_not_named_does_not(authority: Authority, names: tuple[str, ...]) -> None:
    probe, auth = Probe(), Authentication(allowed=AllowedClients(ALLOWED))
    async with guarded(authority, auth, probe) as address, channel_of(address, authority, *names) as channel:
        for method, request in every(b"0"):
            error = await refusal(method(channel)(request, timeout=60))
            assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    seen = [name for name in names if not name.startswith(("cn:", "127."))]
    assert f"names {', '.join(seen) or 'no DNS name and no URI'}; allowed are {', '.join(ALLOWED)}" in error.message
    assert error.metadata == {"seen": ", ".join(seen), "allowed": ", ".join(ALLOWED)}
    assert probe.started == 0


async def test_without_a_certificate_nobody_is_named() -> None:
    """Were a listener in front of the list without TLS, the list would hold all the same."""
    auth = Authentication(allowed=AllowedClients(ALLOWED))
    async with serving(Probe(), first=[auth]) as address, open_channel(address) as channel:
        error = await refusal(once(channel)(b""))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert "no client certificate" in error.message


async def test_who_may_not_come_in_learns_its_health_and_nothing_else(authority: Authority) -> None:
    auth = Authentication(allowed=AllowedClients(ALLOWED))
    async with (
        guarded(authority, auth, Probe()) as address,
        channel_of(address, authority, "other") as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=60)).status == 1
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        error = await refusal(reflection.ServerReflectionInfo(asked, timeout=60))
        assert error.code is grpc.StatusCode.PERMISSION_DENIED


# ------------------------------------------------------------------------------------------------------------ tokens


async def test_each_call_bears_a_token(tokens: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe()
    async with serving(probe, first=[Authentication(tokens=tokens)]) as address, open_channel(address) as channel:
        for token in TOKENS:
            good = (("authorization", f"Bearer {token}"),)
            assert await once(channel)(b"x", metadata=good) == b"x"
            assert [answer async for answer in many(channel)(b"0", metadata=good)] == [b"first", b"last"]
        bad = (("authorization", f"Bearer {TOKENS[0][:-1]}"),)
        for metadata in ((), bad):
            for method, request in [*every(b"0"), *every(BAD)]:
                error = await refusal(method(channel)(request, metadata=metadata))
                assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert (probe.started, probe.decoded) == (4, 4), "what is refused is not decoded either"
    assert "was turned away: UNAUTHENTICATED" in caplog.text
    assert TOKENS[0][:-1] not in caplog.text


async def test_a_name_does_not_do_for_a_token_nor_a_token_for_a_name(authority: Authority, tokens: Tokens) -> None:
    auth = Authentication(allowed=AllowedClients(ALLOWED), tokens=tokens)
    bearing = (("authorization", f"Bearer {TOKENS[0]}"),)
    async with guarded(authority, auth, Probe()) as address:
        async with channel_of(address, authority, ALLOWED[0]) as channel:
            assert await once(channel)(b"x", metadata=bearing) == b"x"
            assert (await refusal(once(channel)(b"x"))).code is grpc.StatusCode.UNAUTHENTICATED
        async with channel_of(address, authority, "other") as channel:
            assert (await refusal(once(channel)(b"x", metadata=bearing))).code is grpc.StatusCode.PERMISSION_DENIED


# ------------------------------------------------------------------------------------------------------- undecodable


async def test_calls_beyond_a_limit_are_not_decoded() -> None:
    probe, auth = Probe(), Authentication(limits=ClientLimits(rate=0.01, burst=3))
    async with serving(probe, first=[auth]) as address, open_channel(address) as channel:
        for method, request in every(BAD)[1:]:
            assert (await refusal(method(channel)(request, timeout=60))).code is grpc.StatusCode.INVALID_ARGUMENT
        for method, request in every(BAD)[1:]:
            assert (await refusal(method(channel)(request, timeout=60))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert probe.decoded == 3


async def test_a_message_that_cannot_be_decoded_is_an_invalid_argument(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Probe()) as address, open_channel(address) as channel:
        for method, request in every(BAD, before=[b"x"]):
            error = await refusal(method(channel)(request, timeout=60))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert error.message == "the message of 1 bytes cannot be decoded: Error parsing message"
        health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert (await refusal(health(BAD * 4, timeout=60))).code is grpc.StatusCode.INVALID_ARGUMENT
        reflection: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert (await refusal(reflection(iter([BAD * 4]), timeout=60))).code is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


# ------------------------------------------------------------------------------------------------------------ limits


async def test_a_client_is_its_token_before_its_name_and_its_name_before_its_address(
    authority: Authority, tokens: Tokens
) -> None:
    """Each has a place of its own; a second call of any has none."""
    auth = Authentication(tokens=tokens, limits=ClientLimits(max_sequences=1))
    async with guarded(authority, auth, Probe()) as address, channel_of(address, authority, "a") as channel:
        held = await hold(channel, TOKENS[0])
        error = await refusal(many(channel)(b"0", metadata=(("authorization", f"Bearer {TOKENS[0]}"),)))
        assert error.metadata["limit"] == "max-client-sequences"
        other = await hold(channel, TOKENS[1])
        assert await once(channel)(b"x", metadata=(("authorization", f"Bearer {TOKENS[0]}"),)) == b"x"
        held.cancel()
        other.cancel()
    auth = Authentication(limits=ClientLimits(max_sequences=1))
    async with (
        guarded(authority, auth, Probe()) as address,
        channel_of(address, authority, "a") as first,
        channel_of(address, authority, "b") as second,
    ):
        calls = [await hold(first), await hold(second)]
        assert (await refusal(many(first)(b"0"))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in calls)
    auth = Authentication(limits=ClientLimits(max_sequences=1))
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection, and so a port, of its own
    async with (
        serving(Probe(), first=[auth]) as address,
        open_channel(address) as first,
        open_channel(address, options=own) as second,
    ):
        call = await hold(first)
        assert (await refusal(many(second)(b"0"))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not call.done()


async def hold(channel: grpc.aio.Channel, token: str = "") -> Any:
    """A call in progress."""
    call = both(channel)(metadata=(("authorization", f"Bearer {token}"),) if token else (), timeout=60)
    await call.write(b"x")
    assert await call.read() == b"x"
    return call


async def test_too_many_calls_are_told_when_to_come_back_and_questions_are_free() -> None:
    auth = Authentication(limits=ClientLimits(rate=0.01, burst=2))
    probe = Probe()
    async with serving(probe, first=[auth]) as address, open_channel(address) as channel:
        for _ in range(5):
            assert await once(channel)(b"x") == b"x"
        for _ in range(2):
            assert [answer async for answer in many(channel)(b"0")] == [b"first", b"last"]
        error = await refusal(many(channel)(b"0"))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 60
        assert "faster than 0.01 a second, and 2 at once" in error.message
        assert probe.started == 7


async def test_who_may_not_come_in_is_not_told_that_the_server_drains(tokens: Tokens) -> None:
    server = create_server(max_message_bytes=1 << 20, first=[Authentication(tokens=tokens)])
    Probe().register(server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    _gates[server].close()
    async with open_channel(address) as channel:
        assert (await refusal(once(channel)(b""))).code is grpc.StatusCode.UNAUTHENTICATED
        bearing = (("authorization", f"Bearer {TOKENS[0]}"),)
        assert (await refusal(once(channel)(b"", metadata=bearing))).reason == "DRAINING"
    await server.stop(None)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:45678", "ipv4:10.1.2.3"),
        ("ipv6:%5B::1%5D:45678", "ipv6:%5B::1%5D"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:", "unix:"),
    ],
)
def test_an_address_is_a_peer_without_its_port(peer: str, address: str) -> None:
    assert address_of(peer) == address


# ----------------------------------------------------------------------------------------------------- token files

FIRST, SECOND = "first-token-0123456789", "second.token~0123456789=="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the clients\n{FIRST}\n\n  {SECOND}\n")
    return path


def bearing(*values: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), *(("authorization", value) for value in values)]


def turned_away(tokens: Tokens, *values: str) -> str:
    with pytest.raises(RequestError) as caught:
        tokens.check(bearing(*values))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert not any(value[7:] in str(caught.value) for value in values if len(value) > 8)
    return caught.value.message


def test_each_token_of_the_file_is_taken_and_tells_its_clients_apart(file: Path) -> None:
    tokens = Tokens(file)
    names = [tokens.check(bearing(f"{scheme} {token}")) for token in (FIRST, SECOND) for scheme in ("Bearer", "bearer")]
    assert names[0] == names[1] != names[2] == names[3]
    assert not any(token in name for token in (FIRST, SECOND) for name in names)


@pytest.mark.parametrize(
    "token",
    [
        FIRST[:-1],
        FIRST[:-1] + "x",
        "x" + FIRST[1:],
        FIRST + "0",
        FIRST[1:],
        FIRST.upper(),
        "",
        f" {FIRST}",
        f"{FIRST} ",
        "# of the clients",
        "é" * 20,
    ],
)
def test_what_is_nearly_a_token_is_none(file: Path, token: str) -> None:
    assert "none of those" in turned_away(Tokens(file), f"Bearer {token}")


def test_a_call_bears_one_token_by_its_scheme(file: Path) -> None:
    tokens = Tokens(file)
    assert "bears no token" in turned_away(tokens)
    assert "is not 'Bearer TOKEN'" in turned_away(tokens, FIRST)
    assert "is not 'Bearer TOKEN'" in turned_away(tokens, f"Basic {FIRST}")
    assert "is not 'Bearer TOKEN'" in turned_away(tokens, f"Bearer {FIRST}", f"Bearer {SECOND}")


def test_a_changed_file_holds_from_the_next_call_on(file: Path) -> None:
    tokens, own = Tokens(file), OwnToken(file)
    assert own.metadata() == (("authorization", f"Bearer {FIRST}"),)
    write(file, f"{SECOND}\n{'n' * LEAST_CHARS}\n".encode())
    turned_away(tokens, f"Bearer {FIRST}")
    assert tokens.check(bearing(f"Bearer {'n' * LEAST_CHARS}"))
    assert own.metadata() == (("authorization", f"Bearer {SECOND}"),)


def test_a_file_that_makes_no_sense_changes_nothing_and_shows_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(file)
    with caplog.at_level(logging.DEBUG):
        for content in (b"", b"# all of them are gone\n", b"too-short\n", b"not a token, but some words\n"):
            write(file, content)
            assert tokens.check(bearing(f"Bearer {FIRST}"))
        file.unlink()
        assert tokens.check(bearing(f"Bearer {FIRST}"))
        assert tokens.check(bearing(f"Bearer {FIRST}"))
    assert len(caplog.records) == 5, "a line for each change, and not for each call"
    assert "too-short" not in caplog.text
    assert "some words" not in caplog.text
    write(file, f"{SECOND}\n".encode())
    turned_away(tokens, f"Bearer {FIRST}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no token"),
        (b"\n# nothing\n", "holds no token"),
        (b"fifteen-letters\n", "line 1 has 15 characters; a token has at least 16"),
        (f"{FIRST}\n\nsome words that are no token\n".encode(), "line 3 is no token"),
        ("ünïcödé-tokens-are-none".encode(), "no text in ASCII"),
    ],
)
def test_a_file_without_tokens_is_refused_at_the_start(file: Path, content: bytes, says: str) -> None:
    write(file, content)
    for make in (Tokens, OwnToken):
        with pytest.raises(FileProblem, match=says):
            make(file)
