"""The benchmark of known prefixes finds them, through the services."""

from benchmarks.prefix import measure


def test_known_beginnings_are_at_hand_and_fresh_ones_are_not(draft_address: str) -> None:
    (row,) = measure(draft_address, (64,), 2)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (80, 64)
    assert min(row["known_ms"], row["fresh_ms"], row["ratio"]) > 0
