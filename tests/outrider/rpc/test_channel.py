"""Addresses are checked. Names are resolved to addresses of one family, and keep them while DNS fails. DNS is the
test's own.
"""

from typing import Any

import pytest

from outrider.rpc.channel import Resolver, checked_address, of_one_family

FOUR = ["10.0.0.1:5", "10.0.0.2:5"]
SIX = ["[fd00::1]:5", "[fd00::2]:5"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("box", "'box' is not HOST:PORT, for example"),
        (":1", "':1' is not HOST:PORT"),
        ("box:", "'box:' is not HOST:PORT"),
        ("box:http", "'box:http' is not HOST:PORT"),
        ("box:-1", "'box:-1' is not HOST:PORT"),
        ("box:²", "'box:²' is not HOST:PORT"),
        ("box:0", "the port of 'box:0' is 0; it must be 1 to 65535"),
        ("box:65536", "the port of 'box:65536' is 65536; it must be 1 to 65535"),
        ("unix:x", "'unix:x' is not unix:PATH with an absolute path"),
    ],
)
def test_a_wrong_address_is_refused_by_name(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        checked_address(address)
    for right in ("box:65535", "[::1]:1", "unix:/x"):
        assert checked_address(right) == right
    assert checked_address("box:0", least_port=0) == "box:0"


@pytest.mark.parametrize(
    ("addresses", "before", "taken"),
    [
        ([*FOUR, FOUR[0]], [], FOUR),  # each once
        ([*SIX, *FOUR], [], SIX),  # as many of both: those named first,
        ([*SIX, *FOUR], FOUR, FOUR),  # unless the others were taken before
        ([*SIX[:1], *FOUR], SIX, FOUR),  # the family with more
    ],
)
def test_a_host_of_two_families_counts_once(addresses: list[str], before: list[str], taken: list[str]) -> None:
    assert of_one_family(addresses, before) == taken


class Table(dict[str, Any]):
    """The IP addresses of hosts, or the error of their lookup."""

    async def lookup(self, host: str, port: int) -> list[str]:
        if isinstance(self[host], OSError):
            raise self[host]
        return [f"{address}:{port}" for address in self[host]]


async def test_a_name_has_all_its_addresses_and_an_address_itself() -> None:
    table = Table(verifiers=["10.0.0.1", "10.0.0.2", "10.0.0.1"], more=["10.0.0.2", "10.0.0.3"])
    resolver = Resolver(["verifiers:5", "10.0.0.9:6", "[::1]:7", "more:5", "unix:/run/v.sock"], table.lookup)
    assert await resolver.resolve() == {
        "10.0.0.1:5": "verifiers:5",
        "10.0.0.2:5": "verifiers:5",
        "10.0.0.9:6": "10.0.0.9:6",
        "[::1]:7": "[::1]:7",
        "10.0.0.3:5": "more:5",
        "unix:/run/v.sock": "unix:/run/v.sock",
    }
    assert resolver.may_change
    assert not Resolver(["10.0.0.9:6", "[::1]:7", "unix:/run/v.sock"]).may_change


@pytest.mark.parametrize("failure", [OSError("no such name"), []])
async def test_a_name_that_cannot_be_resolved_keeps_its_addresses(failure: Any) -> None:
    table = Table(verifiers=["10.0.0.1"])
    resolver = Resolver(["verifiers:5"], table.lookup)
    before = await resolver.resolve()
    table["verifiers"] = failure
    assert await resolver.resolve() == before
    table["verifiers"] = ["10.0.0.2"]
    assert list(await resolver.resolve()) == ["10.0.0.2:5"]
