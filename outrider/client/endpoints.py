"""The draft services of one client: addresses, channels, TLS, tokens and recent failures."""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from outrider.rpc.auth import OwnToken
from outrider.rpc.channel import Metadata, RenewedChannel, Resolver, checked_address, look_up
from outrider.rpc.tls import TLS, ChannelTLS
from protos.outrider.v1 import draft_service_pb2_grpc, verifier_service_pb2_grpc

# Responses stream in small pieces; requests may hold a long prompt.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# A name is resolved again after this long, and when one of its addresses has failed.
RESOLVED_FOR_S = 30.0
# An address that failed is avoided for this long, unless all have failed.
AVOIDED_FOR_S = 10.0
# Calls wait for so long for a new resolution if there are addresses already.
RESOLVING_S = 0.25

_process = 0  # that began the first call


class Stubs:
    """The calls of both services on one channel, and those of health."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.draft = draft_service_pb2_grpc.DraftServiceStub(channel)
        self.verifier = verifier_service_pb2_grpc.VerifierServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


def split(address: str | Sequence[str]) -> list[str]:
    """The addresses in a list, or in text with commas.

    Raises:
        ValueError: there is none, or one is malformed.
    """
    parts = address.split(",") if isinstance(address, str) else address
    names = list(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not names:
        raise ValueError("address is empty; give HOST:PORT of a draft service, or several")
    return [checked_address(name) for name in names]


class Endpoints:
    """The endpoints of one client. For one event loop.

    Args:
        names: `HOST:PORT` each; a DNS name stands for all its addresses.
        tls: None is plaintext.
        token_file: of the bearer token that every call carries.

    Raises:
        ValueError: a file is missing or has the wrong content.
    """

    def __init__(self, names: Sequence[str], tls: TLS | None = None, token_file: str | Path | None = None) -> None:
        self._names = names
        self._resolver = Resolver(names, self._look_up)
        self._tls = None if tls is None else ChannelTLS(tls)
        self._token = None if token_file is None else OwnToken(token_file)
        self._channels: dict[str, RenewedChannel[Stubs]] = {}
        self._named: dict[str, str] = {}  # the name that resolved to each address
        self._failed: dict[str, float] = {}  # when
        self._addresses: list[str] = []
        self._resolved = self._resolving_since = self._failed_at = -RESOLVED_FOR_S
        self._resolving: asyncio.Task[None] | None = None
        self._is_closed = False
        self._turn = random.randrange(1 << 16)  # clients that start together do not all begin at the same address

    async def choose(self, *, takes_turn: bool = True, within: float | None = None) -> str:
        """The address for the next call: in turn, recently failed ones last. A call that takes no turn goes to the
        address of the next one that does. Waits for DNS as `addresses`.
        """
        addresses = await self.addresses(within)
        start = (self._turn + 1) % len(addresses)
        self._turn += takes_turn
        return min(addresses[start:] + addresses[:start], key=self._avoided)

    async def addresses(self, within: float | None = None) -> list[str]:
        """All current addresses, at least one. The first call waits for DNS, for `within` seconds at most; later ones
        hardly wait, since they have addresses.
        """
        if time.monotonic() - self._resolved >= RESOLVED_FOR_S:
            if self._resolving is None:
                self._resolving = asyncio.create_task(self._resolve())
                self._resolving_since = time.monotonic()
            limits = [] if within is None else [within]
            if self._addresses:
                limits.append(max(0.0, self._resolving_since + RESOLVING_S - time.monotonic()))
            await asyncio.wait([self._resolving], timeout=min(limits, default=None))
        return self._addresses or list(self._names)

    async def _resolve(self) -> None:
        try:
            found = await self._resolver.resolve()
            # A single address is left as its name: gRPC resolves it again and again by itself.
            self._addresses = list(found) if len(found) > 1 else list(self._names[:1])
            if self._failed_at <= self._resolving_since:  # else the failed address may be among them
                self._resolved = time.monotonic()
            self._named |= found
            await self._forget_vanished()
        finally:
            self._resolving = None

    async def _look_up(self, host: str, port: int) -> list[str]:
        name = f"{host}:{port}"
        try:
            return [name] if host == "localhost" else await look_up(host, port)
        except OSError:
            if any(known == name != address for address, known in self._named.items()):
                raise  # the resolver keeps the last addresses
            return [name]  # unresolved: gRPC fails with the reason

    async def _forget_vanished(self) -> None:
        """Forgets addresses that are none any more, and closes their channels; a channel in use stays until it is
        idle.
        """
        gone = [each for each in self._channels if each not in self._addresses and self._channels[each].is_idle]
        closing = [self._channels.pop(each) for each in gone]
        kept = {*self._addresses, *self._channels}
        self._named = {address: name for address, name in self._named.items() if address in kept}
        self._failed = {address: when for address, when in self._failed.items() if address in kept}
        await asyncio.gather(*(channel.close() for channel in closing))

    def has_fresh(self) -> bool:
        """Whether there is an address without a recent failure."""
        return any(not self._avoided(address) for address in self._addresses)

    def failed(self, address: str) -> None:
        """Call it when a call there has failed because the service is unreachable, drains, is full, or has a pair that
        does not match.
        """
        self._failed[address] = self._failed_at = time.monotonic()
        self._resolved = -RESOLVED_FOR_S

    def begin(
        self,
        address: str,
        method: str,
        request: Any,
        timeout: float | None,
        *,
        metadata: Metadata = (),
        service: str = "draft",
    ) -> Any:
        """Begins a call of the service there, of `Stubs`; the request of a stream is None.

        Raises:
            RuntimeError: the client is closed; or the process was forked from one that has begun a call. gRPC's threads
                are not in it, so the call would never end.
        """
        global _process
        if self._is_closed:
            raise RuntimeError("the client is closed; make a new one")
        _process = _process or os.getpid()
        if os.getpid() != _process:
            raise RuntimeError(
                "this process was forked from one that has called a service, and gRPC does not work after that: fork "
                "before the first call, or start processes by the method 'spawn'"
            )
        if address not in self._channels:
            self._channels[address] = RenewedChannel(
                address,
                Stubs,
                max_message_bytes=MAX_MESSAGE_BYTES,
                options=[("grpc.enable_retries", 0)],  # the client retries, at the next address and for longer
                tls=self._tls,
                token=self._token,
                name=self._named.get(address, ""),
            )
        return self._channels[address].begin(
            lambda stubs, token: getattr(getattr(stubs, service), method)(
                request, timeout=timeout, metadata=token + metadata
            )
        )

    async def close(self) -> None:
        self._is_closed = True
        if self._resolving is not None:
            self._resolving.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _avoided(self, address: str) -> float:
        """0 for an address without a recent failure, else the time of the failure."""
        failed = self._failed.get(address, 0.0)
        return failed if failed and time.monotonic() - failed < AVOIDED_FOR_S else 0.0
