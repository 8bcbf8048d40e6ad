"""TLS over real sockets: which certificates are accepted, and files that are invalid or change.

`tests/draft_service/test_mutual_tls.py` has the rotation of all files under load.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.rpc.channel import RenewedChannel
from outrider.rpc.tls import TLS, ChannelTLS, FileProblem, ServerTLS, Watched
from tests.certificates import Authority, write
from tests.outrider.rpc.probe import Probe, both, once, serving

SERVER, CLIENT = "probe.models.svc", "client.models.svc"


class Files:
    """An authority with a server and a client of its own, and another authority."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.foreign = Authority(folder / "ours"), Authority(folder / "foreign", "foreign")
        self.server = self.ours.issue(SERVER, file="server")
        self.client = self.ours.issue(CLIENT, file="client")
        self.tls = TLS(ca=self.ours.pem, cert=self.client.cert, key=self.client.key, name=SERVER)

    def credentials(self) -> grpc.ServerCredentials:
        """Those of a server that requires a client certificate."""
        return ServerTLS(self.server.cert, self.server.key, self.ours.pem).credentials()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@asynccontextmanager
async def calling(address: str, tls: TLS | None, name: str = "") -> AsyncIterator[RenewedChannel[Any]]:
    credentials = None if tls is None else ChannelTLS(tls)
    channel: RenewedChannel[Any] = RenewedChannel(
        address, lambda channel: channel, max_message_bytes=1 << 20, tls=credentials, name=name
    )
    try:
        yield channel
    finally:
        await channel.close()


def begin(channel: RenewedChannel[Any]) -> Any:
    return channel.begin(lambda opened, _: once(opened)(b"x", timeout=60))


async def echo(address: str, tls: TLS, name: str = "") -> None:
    async with calling(address, tls, name) as channel:
        assert await begin(channel) == b"x"


async def failure(address: str, tls: TLS | None, name: str = "") -> str:
    """The details of a call without a connection."""
    async with calling(address, tls, name) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await begin(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


async def test_a_client_needs_a_valid_certificate_of_the_ca(files: Files) -> None:
    foreign, expired = files.foreign.issue(CLIENT), files.ours.issue(CLIENT, expired=True)
    probe = Probe()
    async with serving(probe, credentials=files.credentials()) as address:
        for tls in (
            replace(files.tls, cert=None, key=None),
            replace(files.tls, cert=foreign.cert, key=foreign.key),
            replace(files.tls, cert=expired.cert, key=expired.key),
            None,
        ):
            assert await failure(address, tls)
        assert probe.started == 0
        await echo(address, files.tls)


async def test_a_server_certificate_needs_the_ca_and_the_name(files: Files) -> None:
    """The name is that of the address before its resolution, or the one given instead."""
    unnamed = replace(files.tls, name=None)
    async with serving(Probe(), credentials=files.credentials()) as address:
        for tls, name, reason in (
            (unnamed, "", "Hostname Verification"),
            (replace(files.tls, name="other.models.svc"), "", "Hostname Verification"),
            (unnamed, "other.models.svc:50052", "Hostname Verification"),
            (replace(files.tls, ca=files.foreign.pem), "", "handshake"),
        ):
            assert reason in await failure(address, tls, name)
        await echo(address, unnamed, f"{SERVER}:50052")
        write(files.ours.pem, "# Főtanúsítvány: bundles name CAs in UTF-8\n".encode() + files.ours.pem.read_bytes())
        await echo(address, files.tls)


async def test_the_next_call_shows_a_new_client_certificate_and_calls_in_progress_continue(files: Files) -> None:
    seen: list[str] = []

    class Naming(Probe):
        async def Once(self, request: bytes, context: Any) -> bytes:
            seen.append(context.auth_context()["peer_dns"][0].decode())
            return request

    async with (
        serving(Naming(), credentials=files.credentials()) as address,
        calling(address, files.tls) as channel,
    ):
        running = channel.begin(lambda opened, _: both(opened)(timeout=60))
        for number in range(3):
            if number == 1:
                files.ours.issue("second.models.svc", file="client")
            await begin(channel)
            await running.write(b"more")
            assert await running.read() == b"more"
    assert seen == [CLIENT, "second.models.svc", "second.models.svc"]


async def test_an_invalid_change_of_files_changes_nothing(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    """A certificate whose key has not come yet, a file that is gone, and one that is cut off."""
    async with serving(Probe(), credentials=files.credentials()) as address:
        key = files.server.key.read_bytes()
        write(files.server.key, files.client.key.read_bytes())
        await echo(address, files.tls)
        assert "server.key: is not the key of the certificate" in caplog.text
        files.server.key.unlink()
        await echo(address, files.tls)
        write(files.server.key, key[: len(key) // 2])
        await echo(address, files.tls)
        assert "PRIVATE" not in caplog.text
        files.ours.issue("new.models.svc", file="server")
        await echo(address, replace(files.tls, name="new.models.svc"))


def test_invalid_files_are_named_at_the_start(files: Files, tmp_path: Path) -> None:
    cert, key, ca = files.server.cert, files.server.key, files.ours.pem
    text = tmp_path / "text"
    text.write_text("no PEM at all")
    locked = files.ours.issue(SERVER, passphrase=b"secret")
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: ServerTLS(cert, tmp_path / "no.key"), r"no\.key: No such file"),
        (lambda: ServerTLS(cert, files.client.key), "client.key: is not the key of the certificate .*server.crt"),
        (lambda: ServerTLS(text, key), "text and .*server.key: not a PEM certificate and its private key"),
        (lambda: ServerTLS(cert, key, text), "text: has no PEM certificate"),
        (lambda: ServerTLS(locked.cert, locked.key), "has a passphrase"),
        (lambda: ChannelTLS(TLS(ca=ca, cert=cert)), "only one of certificate and key is given"),
        (lambda: ChannelTLS(TLS(ca=ca, cert=cert, key=files.client.key)), "is not the key"),
    ]
    for load, message in bad:
        with pytest.raises(FileProblem, match=message):
            load()


def test_the_folder_of_a_kubernetes_secret_is_watched(tmp_path: Path) -> None:
    """Its files are links through a link, and that one changes."""
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
