"""Where a client's calls go and how it speaks there: addresses, channels, TLS and tokens, recent failures."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from outrider.rpc.auth import OwnToken
from outrider.rpc.channel import RenewedChannel, is_local, of_one_family
from outrider.rpc.tls import TLS, ChannelTLS
from protos.outrider.v1 import draft_service_pb2_grpc

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Security:
    """What a client was told of it."""

    def __init__(self, tls: TLS | None = None, token_file: str | Path | None = None) -> None:
        """Raises `ValueError` (`FileProblem`) where a file is missing, or is not what it should be."""
        self.tls = None if tls is None else ChannelTLS(tls)
        self._token = None if token_file is None else OwnToken(token_file)

    def metadata(self) -> Metadata:
        """What every call carries, as its file has it now."""
        return () if self._token is None else self._token.metadata()


def check_plaintext(names: Sequence[str], *, tls: TLS | None, plaintext: bool) -> None:
    """Checks that plaintext stays on this machine, or is meant to leave it.

    Raises:
        ValueError: neither; or both TLS and plaintext are asked for.
    """
    if tls is not None and plaintext:
        raise ValueError("tls and plaintext exclude each other")
    for name in names:
        if tls is None and not plaintext and not is_local(name):
            raise ValueError(
                f"{name} is not a loopback address, and plaintext can be read on the way there: give tls=TLS(...), or "
                "plaintext=True where the network is trusted"
            )


# Responses stream in small pieces; requests may hold a long prompt.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# A name is asked again after this long, and whenever an address of it has failed.
RESOLVED_FOR_S = 30.0
# An address that failed is taken again after this long; sooner where no other is left.
AVOIDED_FOR_S = 10.0

Stub: TypeAlias = "draft_service_pb2_grpc.DraftServiceAsyncStub"
Call = TypeVar("Call", bound=Any)


def split(address: str | Sequence[str]) -> list[str]:
    """The addresses that a client is given: one, several with commas between, or a list.

    Raises:
        ValueError: there is none.
    """
    parts = address.split(",") if isinstance(address, str) else address
    names = list(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not names:
        raise ValueError("no address of a draft service is given")
    return names


class Places:
    """The draft services of one client. Made and used on one event loop.

    Args:
        names: `HOST:PORT` each; a host that is a name stands for all its addresses.
        security: how to speak to them; by default in plaintext.
    """

    def __init__(self, names: Sequence[str], *, security: Security | None = None) -> None:
        self._names = names
        self._security = Security() if security is None else security
        self._channels: dict[str, RenewedChannel[Stub]] = {}
        self._named: dict[str, str] = {}  # what each address was found by
        self._failed: dict[str, float] = {}  # when
        self._addresses: list[str] = []
        self._known: dict[str, list[str]] = {}  # by name, as resolved last
        self._resolved = -RESOLVED_FOR_S
        self._turn = random.randrange(1 << 16)  # clients that start together do not all begin at the same address

    async def choose(self) -> str:
        """The address for the next call: in turn, those that failed lately last."""
        addresses = await self.addresses()
        self._turn += 1
        start = self._turn % len(addresses)
        return min(addresses[start:] + addresses[:start], key=lambda address: self._avoided(address))

    async def addresses(self) -> list[str]:
        """All there are now, at least one."""
        if time.monotonic() - self._resolved >= RESOLVED_FOR_S:
            for name in self._names:
                self._known[name] = await _resolve(name, self._known.get(name, []))
                for address in self._known[name]:
                    self._named.setdefault(address, name)
            found = [address for name in self._names for address in self._known[name]]
            # With one address it is the name itself: gRPC resolves it, over and over, on its own.
            self._addresses = list(dict.fromkeys(found)) if len(set(found)) > 1 else list(self._names[:1])
            self._resolved = time.monotonic()
        return self._addresses

    def has_fresh(self) -> bool:
        """Whether there is an address that has not failed lately."""
        return any(not self._avoided(address) for address in self._addresses)

    def failed(self, address: str) -> None:
        """A call there met nobody, or somebody who is leaving."""
        self._failed[address] = time.monotonic()
        self._resolved = -RESOLVED_FOR_S

    def begin(self, address: str, start: Callable[[Stub, Metadata], Call]) -> Call:
        """Begins a call to the service there; `start` makes it, with the metadata that every call carries."""
        if address not in self._channels:
            self._channels[address] = RenewedChannel(
                address,
                draft_service_pb2_grpc.DraftServiceStub,
                max_message_bytes=MAX_MESSAGE_BYTES,
                options=[("grpc.enable_retries", 0)],  # the client retries, at the next address and for longer
                tls=self._security.tls,
                name=self._named.get(address, ""),
            )
        metadata = self._security.metadata()
        return self._channels[address].begin(lambda stub: start(stub, metadata))

    async def close(self) -> None:
        """Closes every channel."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _avoided(self, address: str) -> float:
        """0 for an address that may be taken, and otherwise the more the later it failed."""
        failed = self._failed.get(address, 0.0)
        return failed if failed and time.monotonic() - failed < AVOIDED_FOR_S else 0.0


async def _resolve(name: str, before: Sequence[str]) -> list[str]:
    """The addresses of `HOST:PORT`, of one family; the name itself where it is one, or where nobody knows it now.

    `before` are those that it had last.
    """
    host, colon, port = name.rpartition(":")
    if not colon or not port.isdigit() or host == "localhost" or _is_ip(host.strip("[]")):
        return [name]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return [name]
    ips = [str(entry[4][0]) for entry in found]
    return of_one_family([f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips], before)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
