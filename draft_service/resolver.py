"""Names of verifiers become addresses: each DNS name stands for all its A or AAAA records, whenever it is looked at.

A verifier with an address of either family is one verifier (`of_one_family`).
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

from outrider.rpc.channel import SOCKET, of_one_family

_log = structlog.get_logger()

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses `IP:PORT`; raises `OSError` where that fails."""


async def look_up(host: str, port: int) -> list[str]:
    """Asks the system's resolver, which asks DNS. Families that this machine has no address of are left out.

    Raises:
        OSError: the name is not known, or nobody answers.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [join(str(address[0]), port) for *_, address in found]


def split(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join(host: str, port: int) -> str:
    """`HOST:PORT`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Directory:
    """What a list of `HOST:PORT` or `unix:PATH` stands for.

    Attributes:
        names: the list.
        changes: whether looking again may find something else: some host is a name.
    """

    def __init__(self, names: Sequence[str], resolve: Resolve = look_up) -> None:
        """`resolve` is asked for hosts that are no addresses themselves."""
        self.names = tuple(names)
        self.changes = any(not _is_address(name) for name in self.names)
        self._resolve = resolve
        self._last: dict[str, list[str]] = {}

    async def look(self) -> dict[str, str]:
        """The addresses, in the order of the names, each with the name it was found by.

        A name that cannot be resolved keeps the addresses it had: that DNS is away says nothing of those behind it.
        """
        found: dict[str, str] = {}
        for name in self.names:
            for address in await self._addresses(name):
                found.setdefault(address, name)
        return found

    async def _addresses(self, name: str) -> list[str]:
        if _is_address(name):
            return [name]
        host, port = split(name)
        try:
            addresses = of_one_family(await self._resolve(host, port), self._last.get(name, []))
        except OSError as error:
            _log.warning("a verifier's name cannot be resolved", verifier=name, reason=str(error))
            return self._last.get(name, [])
        if set(addresses) != set(self._last.get(name, [])):
            _log.info("a verifier's name was resolved", verifier=name, addresses=sorted(addresses))
        if addresses:
            self._last[name] = addresses
        return self._last.get(name, [])


def _is_address(name: str) -> bool:
    """Whether `HOST:PORT` or `unix:PATH` stands for itself alone."""
    if name.startswith(SOCKET):
        return True
    try:
        ipaddress.ip_address(split(name)[0].partition("%")[0])
    except ValueError:
        return False
    return True
