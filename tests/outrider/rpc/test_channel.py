"""Hosts of two families count once."""

import pytest

from outrider.rpc.channel import of_one_family

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
