"""Blocks are held, cached, reserved and released; the books stay in order, whatever is done."""

import random

import pytest

from outrider.runtime.block_pool import BlockPool, PoolCorrupted, PoolExhausted


def named(blocks: BlockPool, *names: str) -> list[int]:
    """Takes a block for each name, releases it, and leaves it known."""
    taken = []
    for name in names:
        block = blocks.take()
        blocks.cache(block, name.encode())
        taken.append(block)
    for block in taken:
        blocks.release(block)
    return taken


def test_each_block_is_taken_once() -> None:
    blocks = BlockPool(3)
    assert sorted(blocks.take() for _ in range(3)) == [0, 1, 2]
    assert blocks.num_free == 0
    with pytest.raises(PoolExhausted, match="all 3 blocks"):
        blocks.take()
    blocks.release(1)
    assert blocks.take() == 1


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    blocks = BlockPool(2)
    block = blocks.take()
    blocks.hold(block)
    blocks.release(block)
    assert (blocks.ref_count(block), blocks.num_free) == (1, 1)
    blocks.release(block)
    assert blocks.num_free == 2
    with pytest.raises(ValueError, match=f"block {block} is released, and nobody holds it"):
        blocks.release(block)


def test_what_was_not_used_for_longest_goes_first_after_what_nobody_knows() -> None:
    blocks = BlockPool(4)
    a, b, c = named(blocks, "a", "b", "c")
    blocks.hold(a)  # used once more
    blocks.release(a)
    unknown = ({0, 1, 2, 3} - {a, b, c}).pop()
    assert [blocks.take() for _ in range(4)] == [unknown, b, c, a]
    assert blocks.find(b"a") is None


def test_what_nobody_knows_goes_before_what_is_known_however_lately_it_was_used() -> None:
    blocks = BlockPool(2)
    (known,) = named(blocks, "a")
    other = blocks.take()
    blocks.release(other)
    assert [blocks.take(), blocks.take()] == [other, known]


def test_a_known_block_is_found_held_or_not_until_it_is_taken() -> None:
    blocks = BlockPool(1)
    (block,) = named(blocks, "a")
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
    start = blocks.reserve(3)
    assert start == 0
    others = [blocks.take() for _ in range(3)]
    assert not {0, 1, 2} & set(others)
    assert blocks.take(wanted=1) == 1
    assert blocks.take() in (0, 2)  # nothing else is left
    blocks.unreserve(range(3))
    assert blocks.num_free == 1


def test_runs_are_reserved_beside_each_other_and_not_over_what_is_held() -> None:
    blocks = BlockPool(10)
    assert blocks.reserve(4) == 0
    assert blocks.reserve(4) == 4
    assert blocks.reserve(4) is None
    blocks.unreserve(range(4))
    assert blocks.reserve(4) == 0
    taken = blocks.take(wanted=9)
    blocks.unreserve(range(4))
    blocks.unreserve(range(4, 8))
    assert blocks.reserve(9) == 0
    assert blocks.reserve(2) is None
    blocks.release(taken)


def test_a_run_spares_what_was_used_of_late() -> None:
    blocks = BlockPool(8)
    old = named(blocks, *"abcd")
    late = named(blocks, *"efgh")
    start = blocks.reserve(4)
    assert start is not None
    assert set(range(start, start + 4)) == set(old)
    assert blocks.reserve(3) is None, f"only half of {late} is old by now"


def test_broken_books_are_told() -> None:
    lost, owned, known = BlockPool(3), BlockPool(3), BlockPool(3)
    lost._free.popitem()
    with pytest.raises(PoolCorrupted, match="0 free lists"):
        lost.check_integrity([])
    block = owned.take()
    with pytest.raises(PoolCorrupted, match=f"block {block} counts 1 holders, and 2 hold it"):
        owned.check_integrity([[block], [block]])
    with pytest.raises(PoolCorrupted, match="counts 1 holders, and 0 hold it"):
        owned.check_integrity([])
    named(known, "a")
    known._block_of_key[b"b"] = 2
    with pytest.raises(PoolCorrupted, match="does not lead to it"):
        known.check_integrity([])


def test_the_books_agree_after_any_use() -> None:
    rng = random.Random(3)
    blocks = BlockPool(12)
    held: list[int] = []
    runs: list[range] = []
    for step in range(4000):
        match rng.choice(["take", "hold", "release", "release", "cache", "reserve", "unreserve"]):
            case "take" if blocks.num_free:
                wanted = rng.choice([None, rng.randrange(12)])
                block = blocks.take(wanted)
                assert block not in held
                held.append(block)
            case "hold":
                block = rng.randrange(12)
                blocks.hold(block)
                held.append(block)
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
