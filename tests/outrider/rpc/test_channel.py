"""What names stand for, and that hosts of two families count once. DNS is the test's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from outrider.rpc.channel import Lookup, Resolver, look_up, of_one_family

FOUR = ["10.0.0.1:5", "10.0.0.2:5"]
SIX = ["[fd00::1]:5", "[fd00::2]:5"]


@pytest.mark.parametrize(
    ("addresses", "before", "taken"),
    [
        ([], [], []),
        ([*FOUR, FOUR[0]], [], FOUR),
        (SIX, FOUR, SIX),
        ([*SIX, *FOUR], [], SIX),
        ([FOUR[0], *SIX, FOUR[1]], [], FOUR),
        ([*SIX, *FOUR], FOUR, FOUR),
        ([*FOUR, *SIX], SIX[:1], SIX),
        ([*SIX[:1], *FOUR], SIX, FOUR),
    ],
    ids=[
        "nobody",
        "one family, each once",
        "the other family alone",
        "as many of both: the one that was named first",
        "in their order",
        "as many of both: the one that was taken before",
        "also where one was taken before",
        "the one with more",
    ],
)
def test_which_addresses_stand_for_a_name(addresses: list[str], before: list[str], taken: list[str]) -> None:
    assert of_one_family(addresses, before) == taken


def table(entries: Mapping[str, Sequence[str] | OSError]) -> Lookup:
    """Knows these hosts; what the mapping holds may change."""

    async def lookup(host: str, port: int) -> list[str]:
        found = entries[host]
        if isinstance(found, OSError):
            raise found
        return [f"{address}:{port}" for address in found]

    return lookup


async def test_a_name_stands_for_all_its_addresses_and_an_address_for_itself() -> None:
    lookup = table({"verifiers": ["10.0.0.1", "10.0.0.2", "10.0.0.1"], "more": ["10.0.0.2", "10.0.0.3"]})
    resolver = Resolver(["verifiers:5", "10.0.0.9:6", "[::1]:7", "more:5", "unix:/run/v.sock"], lookup)
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


async def test_a_host_of_both_families_stays_the_one_it_was_whatever_is_named_first() -> None:
    entries = {"verifiers": ["[fd00::1]", "[fd00::2]", "10.0.0.1", "10.0.0.2"], "new": ["10.0.0.3"]}
    resolver = Resolver(["verifiers:5", "new:5"], table(entries))
    assert list(await resolver.resolve()) == [*SIX, "10.0.0.3:5"]
    entries["verifiers"].reverse()
    assert sorted(await resolver.resolve()) == sorted([*SIX, "10.0.0.3:5"])


@pytest.mark.parametrize("failure", [OSError("no such name"), []])
async def test_a_name_that_cannot_be_resolved_keeps_its_addresses(failure: Any) -> None:
    entries: dict[str, Any] = {"verifiers": ["10.0.0.1"]}
    resolver = Resolver(["verifiers:5"], table(entries))
    before = await resolver.resolve()
    entries["verifiers"] = failure
    assert await resolver.resolve() == before
    entries["verifiers"] = ["10.0.0.2"]
    assert list(await resolver.resolve()) == ["10.0.0.2:5"]


async def test_the_system_resolves_names_as_every_program_has_them_resolved() -> None:
    assert "127.0.0.1:5" in await look_up("localhost", 5)
    with pytest.raises(OSError, match=r"."):
        await look_up("no.such.name.invalid", 5)
