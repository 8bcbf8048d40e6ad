"""Where a client's calls go: every address of a name, and those that failed lately last."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.client.endpoints import Endpoints, split


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Resolves every name to `ips`; `asked` has the names."""
    found = SimpleNamespace(ips=["10.0.0.1", "10.0.0.2"], asked=[])

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        found.asked.append(host)
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in ip], socket.SOCK_STREAM, 6, "", (ip, port)) for ip in found.ips]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return found


async def test_a_name_is_all_its_addresses_and_resolved_again_when_one_fails(resolver: Any) -> None:
    endpoints = Endpoints(["drafts:50051", "127.0.0.1:7"])
    first = [await endpoints.choose() for _ in range(6)]
    assert sorted(set(first)) == ["10.0.0.1:50051", "10.0.0.2:50051", "127.0.0.1:7"]
    assert resolver.asked == ["drafts"]
    resolver.ips[1] = "10.0.0.3"
    endpoints.failed("10.0.0.1:50051")
    later = {await endpoints.choose() for _ in range(6)}
    assert resolver.asked == ["drafts", "drafts"]
    assert later == {"10.0.0.3:50051", "127.0.0.1:7"}, "what failed is passed over while there are others"
    endpoints.failed("10.0.0.3:50051")
    endpoints.failed("127.0.0.1:7")
    assert await endpoints.choose() == "10.0.0.1:50051", "what failed first"
    assert not endpoints.has_fresh()


@pytest.mark.parametrize(
    ("given", "names"),
    [("a:1", ["a:1"]), ("a:1, b:2,a:1", ["a:1", "b:2"]), (["a:1", "b:2"], ["a:1", "b:2"])],
)
def test_addresses_may_be_a_list_or_have_commas_between(given: Any, names: list[str]) -> None:
    assert split(given) == names
    with pytest.raises(ValueError, match="no address"):
        split(" , ")
