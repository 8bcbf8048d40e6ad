"""Blocks are held, cached, reserved and released; the counts agree, whatever is done."""

import random

import pytest

from outrider.runtime.block_pool import BlockPool, PoolCorrupted, PoolExhausted


def cached(blocks: BlockPool, *keys: str) -> list[int]:
    """Take a block for each key, cache it and release it."""
    taken = []
    for key in keys:
        block = blocks.take()
        blocks.cache(block, key.encode())
        taken.append(block)
    for block in taken:
        blocks.release(block)
    return taken


def test_each_block_is_taken_once_and_free_when_its_last_holder_releases_it() -> None:
    blocks = BlockPool(3)
    assert sorted(blocks.take() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(PoolExhausted, match="all 3 blocks"):
        blocks.take()
    blocks.hold(1)
    blocks.release(1)
    assert (blocks.ref_count(1), blocks.num_free) == (1, 0)
    blocks.release(1)
    assert (blocks.take(), blocks.num_free) == (1, 0)
    blocks.release(1)
    with pytest.raises(ValueError, match="block 1 is released, and nobody holds it"):
        blocks.release(1)


def test_blocks_are_taken_least_recently_used_first_and_uncached_ones_before() -> None:
    blocks = BlockPool(4)
    a, b, c = cached(blocks, "a", "b", "c")
    blocks.hold(a)  # used once more
    blocks.release(a)
    uncached = ({0, 1, 2, 3} - {a, b, c}).pop()
    blocks.hold(uncached)  # and later than any
    blocks.release(uncached)
    assert [blocks.take() for _ in range(4)] == [uncached, b, c, a]
    assert blocks.find(b"a") is None


def test_a_cached_block_is_found_held_or_not_until_it_is_taken() -> None:
    blocks = BlockPool(1)
    (block,) = cached(blocks, "a")
    assert blocks.find(b"a") == block
    blocks.hold(block)
    assert blocks.find(b"a") == block
    blocks.release(block)
    blocks.take()
    assert blocks.find(b"a") is None


def test_the_first_block_of_a_key_keeps_it() -> None:
    blocks = BlockPool(2)
    first, second = blocks.take(), blocks.take()
    blocks.cache(first, b"a")
    blocks.cache(second, b"a")
    assert blocks.find(b"a") == first
    blocks.release(second)
    blocks.check_integrity([[first]])


def test_a_reserved_run_is_left_alone_while_there_is_a_choice() -> None:
    blocks = BlockPool(6)
    assert blocks.reserve(3) == 0
    assert not {0, 1, 2} & {blocks.take() for _ in range(3)}
    assert blocks.take(wanted=1) == 1
    assert blocks.take() in (0, 2)  # nothing else is left
    blocks.unreserve(range(3))
    assert blocks.num_free == 1


def test_runs_are_reserved_side_by_side_and_not_over_held_blocks() -> None:
    blocks = BlockPool(10)
    assert [blocks.reserve(4) for _ in range(3)] == [0, 4, None]
    blocks.unreserve(range(4))
    assert blocks.reserve(4) == 0
    blocks.take(wanted=9)
    blocks.unreserve(range(4))
    blocks.unreserve(range(4, 8))
    assert [blocks.reserve(9), blocks.reserve(2)] == [0, None]


def test_a_run_spares_recently_used_blocks() -> None:
    blocks = BlockPool(8)
    old, recent = cached(blocks, *"abcd"), cached(blocks, *"efgh")
    start = blocks.reserve(4)
    assert start is not None
    assert set(range(start, start + 4)) == set(old)
    assert blocks.reserve(3) is None, f"only half of {recent} is old by now"


def test_corruption_is_noticed() -> None:
    lost, owned, known = BlockPool(3), BlockPool(3), BlockPool(3)
    lost._free.popitem()
    with pytest.raises(PoolCorrupted, match="0 free lists"):
        lost.check_integrity([])
    block = owned.take()
    with pytest.raises(PoolCorrupted, match=f"block {block} counts 1 holders, and 2 hold it"):
        owned.check_integrity([[block], [block]])
    with pytest.raises(PoolCorrupted, match="counts 1 holders, and 0 hold it"):
        owned.check_integrity([])
    cached(known, "a")
    known._block_of_key[b"b"] = 2
    with pytest.raises(PoolCorrupted, match="does not lead to it"):
        known.check_integrity([])


def test_random_operations_keep_the_counts() -> None:
    rng = random.Random(3)
    blocks = BlockPool(12)
    held: list[int] = []
    runs: list[range] = []
    for step in range(4000):
        match rng.choice(["take", "hold", "release", "release", "cache", "reserve", "unreserve"]):
            case "take" if blocks.num_free:
                block = blocks.take(rng.choice([None, rng.randrange(12)]))
                assert block not in held
                held.append(block)
            case "hold":
                held.append(rng.randrange(12))
                blocks.hold(held[-1])
            case "release" if held:
                blocks.release(held.pop(rng.randrange(len(held))))
            case "cache" if held:
                blocks.cache(rng.choice(held), b"%d" % (step % 7))
            case "reserve":
                count = rng.randint(1, 5)
                start = blocks.reserve(count)
                if start is not None:
                    run = range(start, start + count)
                    assert not any(set(run) & set(other) for other in runs)
                    runs.append(run)
            case "unreserve" if runs:
                blocks.unreserve(runs.pop(rng.randrange(len(runs))))
        blocks.check_integrity([held])
        assert blocks.num_free == 12 - len(set(held))
