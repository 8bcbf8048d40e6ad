"""The endpoints of a client: turns, failures, and names whose addresses change or cannot be resolved."""

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.client import AsyncClient, OutriderError
from outrider.client.endpoints import Endpoints, split
from protos.outrider.v1 import draft_service_pb2 as pb


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Resolves every name to `ips` after `seconds`, or raises `error`; `names` are those resolved."""
    found = SimpleNamespace(ips=["10.0.0.1", "10.0.0.2"], names=[], error=None, seconds=0.0)

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        found.names.append(host)
        await asyncio.sleep(found.seconds)
        if found.error is not None:
            raise found.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in found.ips]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return found


async def test_a_name_is_all_its_addresses_and_resolved_again_when_one_fails(resolver: Any) -> None:
    endpoints = Endpoints(["drafts:50051", "127.0.0.1:7"])
    first = [await endpoints.choose() for _ in range(6)]
    assert sorted(set(first)) == ["10.0.0.1:50051", "10.0.0.2:50051", "127.0.0.1:7"]
    assert resolver.names == ["drafts"]
    resolver.ips[1] = "10.0.0.3"
    endpoints.failed("10.0.0.1:50051")
    later = {await endpoints.choose() for _ in range(6)}
    assert resolver.names == ["drafts", "drafts"]
    assert later == {"10.0.0.3:50051", "127.0.0.1:7"}, "a failed address is avoided while there are others"
    endpoints.failed("10.0.0.3:50051")
    endpoints.failed("127.0.0.1:7")
    assert await endpoints.choose() == "10.0.0.1:50051", "the first that failed"
    assert not endpoints.has_fresh()


async def test_a_vanished_address_is_forgotten_once_its_channel_is_idle(resolver: Any) -> None:
    with socket.create_server(("", 0)) as silent:
        resolver.ips = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        endpoints = Endpoints([f"drafts:{silent.getsockname()[1]}"])
        request = pb.DraftServiceGetModelRequest()
        used = await endpoints.addresses()
        calls = [endpoints.begin(address, "GetModel", request, timeout=60) for address in used]
        for address, call in zip(used[:2], calls, strict=False):
            call.cancel()
            await asyncio.wait([asyncio.ensure_future(call.wait_for_connection())])
            endpoints.failed(address)
        resolver.ips = ["127.0.0.1", "127.0.0.4"]
        await endpoints.addresses()
        assert set(endpoints._channels) == {used[0], used[2]}
        assert set(endpoints._failed) == {used[0]}
        assert not calls[2].done(), "a call in progress keeps its channel"
        calls[2].cancel()
        await endpoints.close()


async def test_addresses_stay_in_use_while_dns_fails(resolver: Any) -> None:
    endpoints = Endpoints(["drafts:50051", "others:1"])
    addresses = await endpoints.addresses()
    assert len(addresses) == 4
    resolver.error = socket.gaierror(socket.EAI_AGAIN, "again")
    endpoints.failed(addresses[0])
    assert await endpoints.addresses() == addresses
    resolver.error, resolver.ips = None, ["10.0.0.1"]
    endpoints.failed(addresses[0])
    assert await endpoints.addresses() == ["10.0.0.1:50051", "10.0.0.1:1"]


async def test_a_name_that_was_never_resolved_is_left_to_grpc(resolver: Any) -> None:
    resolver.error = socket.gaierror(socket.EAI_NONAME, "unknown")
    endpoints = Endpoints(["drafts:50051", "127.0.0.1:7"])
    assert await endpoints.addresses() == ["drafts:50051", "127.0.0.1:7"]
    resolver.error = None
    endpoints.failed("drafts:50051")
    assert await endpoints.addresses() == ["10.0.0.1:50051", "10.0.0.2:50051", "127.0.0.1:7"]


async def test_a_slow_resolution_delays_calls_by_their_timeout_and_later_ones_hardly(resolver: Any) -> None:
    """All calls wait for the same one."""
    resolver.seconds = 1.5
    endpoints, began = Endpoints(["drafts:50051"]), time.monotonic()
    assert set(await asyncio.gather(*(endpoints.choose(within=0.1) for _ in range(5)))) == {"drafts:50051"}
    assert time.monotonic() - began < 1.0
    known = await endpoints.addresses()
    assert known == ["10.0.0.1:50051", "10.0.0.2:50051"]
    assert resolver.names == ["drafts"]
    endpoints.failed(known[0])
    resolver.ips, began = ["10.0.0.3", "10.0.0.4"], time.monotonic()
    assert await endpoints.addresses() == await endpoints.addresses() == known
    assert time.monotonic() - began < 1.0
    assert resolver.names == ["drafts", "drafts"]
    endpoints.failed(known[1])  # after the question, so the answer may be too old
    assert endpoints._resolving is not None
    await endpoints._resolving
    assert await endpoints.addresses() == ["10.0.0.3:50051", "10.0.0.4:50051"]
    assert resolver.names == ["drafts"] * 3
    await endpoints.close()


async def test_the_timeout_of_a_call_holds_while_dns_is_silent(resolver: Any) -> None:
    resolver.seconds, began = 30.0, time.monotonic()
    async with AsyncClient("drafts:50051", plaintext=True) as client:
        with pytest.raises(OutriderError):
            await client.get_model(timeout=0.3)
    assert time.monotonic() - began < 10.0


async def test_a_call_that_takes_no_turn_goes_where_the_next_one_goes() -> None:
    endpoints = Endpoints(["127.0.0.1:7", "127.0.0.1:8"])
    chosen = [await endpoints.choose(takes_turn=takes_turn) for takes_turn in (False, False, True) * 4]
    assert [len(set(chosen[i : i + 3])) for i in range(0, 12, 3)] == [1] * 4
    assert chosen[2] != chosen[5] != chosen[8]


def test_addresses_are_a_list_or_text_with_commas() -> None:
    assert split("a:1, b:2,a:1") == split(["a:1", "b:2"]) == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="'box:99999' is 99999; it must be 1 to 65535"):
        split("box:99999")
    with pytest.raises(ValueError, match="address is empty"):
        split(" , ")
