"""Over real sockets: who has no certificate of the CA gets nowhere, and files that change are taken up."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.rpc.auth import AllowedClients, Authentication
from outrider.rpc.channel import RenewedChannel
from outrider.rpc.tls import TLS, ChannelTLS, FileProblem, ServerTLS, Watched
from tests.certificates import Authority, Certificate, write
from tests.outrider.rpc.probe import Probe, both, once, serving

SERVER, CLIENT = "probe.models.svc", "client.models.svc"


class Files:
    """An authority with a server and a client of its own, and another authority."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.foreign = Authority(folder / "ours"), Authority(folder / "foreign", "foreign")
        self.server = self.ours.issue(SERVER, file="server")
        self.client = self.ours.issue(CLIENT, file="client")
        self.tls = TLS(ca=self.ours.pem, cert=self.client.cert, key=self.client.key, name=SERVER)

    def asking(self) -> ServerTLS:
        """A listener that asks clients for a certificate."""
        return ServerTLS(self.server.cert, self.server.key, self.ours.pem)

    def showing(self, shown: Certificate | None) -> TLS:
        return replace(self.tls, cert=None if shown is None else shown.cert, key=None if shown is None else shown.key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@asynccontextmanager
async def calling(address: str, tls: TLS | None, name: str = "") -> AsyncIterator[RenewedChannel[Any]]:
    made = None if tls is None else ChannelTLS(tls)
    channel: RenewedChannel[Any] = RenewedChannel(address, Stub, max_message_bytes=1 << 20, tls=made, name=name)
    try:
        yield channel
    finally:
        await channel.close()


class Stub:
    """The probe's methods on a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.once, self.both = once(channel), both(channel)


async def echo(channel: RenewedChannel[Any]) -> None:
    assert await channel.begin(lambda stub: stub.once(b"x", timeout=60)) == b"x"


async def stream(channel: RenewedChannel[Any]) -> Any:
    """A call in progress."""
    call = channel.begin(lambda stub: stub.both(timeout=60))
    await goes_on(call)
    return call


async def goes_on(call: Any) -> None:
    await call.write(b"more")
    assert await call.read() == b"more"


async def fails(address: str, tls: TLS | None, name: str = "") -> str:
    """The details of a call without a connection."""
    async with calling(address, tls, name) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.begin(lambda stub: stub.once(b"x", timeout=60))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


# --------------------------------------------------------------------------------------------------- the handshake


async def test_clients_without_one_or_of_another_ca_or_expired_get_nowhere(files: Files) -> None:
    probe = Probe()
    strangers = {
        "none": files.showing(None),
        "of another CA": files.showing(files.foreign.issue(CLIENT)),
        "expired": files.showing(files.ours.issue(CLIENT, expired=True)),
        "no TLS": None,
    }
    async with serving(probe, credentials=files.asking().credentials()) as address:
        for tls in strangers.values():
            await fails(address, tls)
        assert probe.started == 0
        async with calling(address, files.tls) as channel:  # the server is well, and it was they
            await echo(channel)


async def test_a_server_is_believed_by_its_ca_and_by_its_name(files: Files) -> None:
    """The name is that which was asked for, or the one that was given in its place."""
    async with serving(Probe(), credentials=files.asking().credentials()) as address:
        unnamed = replace(files.tls, name=None)
        assert "Hostname Verification" in await fails(address, unnamed)
        assert "Hostname Verification" in await fails(address, replace(files.tls, name="other.models.svc"))
        assert "Hostname Verification" in await fails(address, unnamed, "other.models.svc:50052")
        assert "handshake" in await fails(address, replace(files.tls, ca=files.foreign.pem))
        async with calling(address, unnamed, f"{SERVER}:50052") as channel:  # an address that a name was resolved to
            await echo(channel)


# ------------------------------------------------------------------------------------------------ files that change


async def test_a_new_certificate_of_the_server_is_shown_to_new_connections_and_ends_no_call(files: Files) -> None:
    async with (
        serving(Probe(), credentials=files.asking().credentials()) as address,
        calling(address, files.tls) as old,
    ):
        running = await stream(old)
        files.ours.issue("new.models.svc", file="server")
        async with calling(address, replace(files.tls, name="new.models.svc")) as new:
            await echo(new)
        await fails(address, files.tls)
        await goes_on(running)
        await echo(old)  # its connection was there before


async def test_a_new_certificate_of_a_client_is_shown_by_the_next_call_and_ends_none(files: Files) -> None:
    first = [Authentication(allowed=AllowedClients(["second.models.svc", CLIENT]))]
    seen: list[str] = []

    class Naming(Probe):
        async def Once(self, request: bytes, context: Any) -> bytes:
            seen.append(context.auth_context()["peer_dns"][0].decode())
            return request

    async with (
        serving(Naming(), first=first, credentials=files.asking().credentials()) as address,
        calling(address, files.tls) as channel,
    ):
        await echo(channel)
        running = await stream(channel)
        files.ours.issue("second.models.svc", file="client")
        await echo(channel)
        await goes_on(running)
        await echo(channel)
    assert seen == [CLIENT, "second.models.svc", "second.models.svc"]


async def test_a_change_that_makes_no_sense_leaves_things_as_they_are(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate whose key has not come yet, a file that is gone, and one that is cut off."""
    async with serving(Probe(), credentials=files.asking().credentials()) as address:
        key = files.server.key.read_bytes()
        write(files.server.key, files.client.key.read_bytes())
        async with calling(address, files.tls) as channel:
            await echo(channel)
        assert "server.key: is not the key of the certificate" in caplog.text
        files.server.key.unlink()
        async with calling(address, files.tls) as channel:
            await echo(channel)
        write(files.server.key, key[: len(key) // 2])
        async with calling(address, files.tls) as channel:
            await echo(channel)
            assert "PRIVATE" not in caplog.text
            files.ours.issue("third.models.svc", file="server")
            async with calling(address, replace(files.tls, name="third.models.svc")) as new:
                await echo(new)


# ----------------------------------------------------------------------------------------------- files at the start


def test_files_that_are_not_what_they_should_be_are_named(files: Files, tmp_path: Path) -> None:
    cert, key, ca = files.server.cert, files.server.key, files.ours.pem
    text = tmp_path / "text"
    text.write_text("no PEM at all")
    locked = files.ours.issue(SERVER, passphrase=b"secret")
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: ServerTLS(cert, tmp_path / "no.key"), r"no\.key: No such file"),
        (lambda: ServerTLS(cert, files.client.key), "client.key: is not the key of the certificate .*server.crt"),
        (lambda: ServerTLS(text, key), "text and .*server.key: are not a PEM certificate and its private key"),
        (lambda: ServerTLS(cert, key, text), "text: has no PEM certificate"),
        (lambda: ServerTLS(locked.cert, locked.key), "has a passphrase"),
        (lambda: ChannelTLS(TLS(ca=ca, cert=cert)), "go together"),
        (lambda: ChannelTLS(TLS(ca=ca, cert=cert, key=files.client.key)), "is not the key"),
    ]
    for make, says in bad:
        with pytest.raises(FileProblem, match=says):
            make()


def test_the_folder_of_a_kubernetes_secret_is_followed(tmp_path: Path) -> None:
    """Its files are links through a link, which is what changes."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "tls.key", name.encode())
    (tmp_path / "..data").symlink_to("one")
    path = tmp_path / "tls.key"
    path.symlink_to("..data/tls.key")
    watched = Watched([path], path.read_bytes)
    assert watched.look() == (0, b"one")
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert watched.look() == (1, b"two")
