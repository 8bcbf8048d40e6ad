"""Slots are handed out once, forks are copies, lengths are numbers, and the books stay in order."""

import random

import pytest
import torch

from outrider.lm.kv_pool import KVPool, PoolCorrupted, PoolExhausted


def make(
    max_sequences: int = 3, max_length: int = 8, kv_heads: int | list[int] = 2, head_dim: int | list[int] = 4
) -> KVPool:
    return KVPool(
        2, kv_heads, head_dim, max_sequences=max_sequences, max_length=max_length, dtype=torch.float32, device="cpu"
    )


def fill(pool: KVPool, slot: int, start: int, end: int, value: float) -> None:
    for new in pool.views(slot, start, end).new:
        new.fill_(value)
    pool.extend(slot, end)


def test_slots_are_taken_once_and_come_back() -> None:
    pool = make()
    slots = [pool.allocate() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    assert pool.free_slots == 0
    with pytest.raises(PoolExhausted, match="all 3 slots"):
        pool.allocate()
    pool.free(slots[1])
    assert pool.free_slots == 1
    assert pool.allocate() == slots[1]
    assert pool.length(slots[1]) == 0


def test_what_is_written_is_read_and_nothing_beside_it() -> None:
    pool = make()
    first, second = pool.allocate(), pool.allocate()
    for slot in (first, second):
        for new in pool.views(slot, 0, 8).new:
            new.fill_(-1)
    fill(pool, first, 0, 3, 1)
    fill(pool, first, 3, 5, 2)
    views = pool.views(first, 5, 6)
    for tensor in (*views.keys, *views.values):
        assert tensor.shape == (2, 1, 6, 4)
        assert tensor[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2, -1]
        assert tensor[1, 0].is_contiguous()
    assert all(bool((tensor == -1).all()) for tensor in pool.views(second, 0, 8).keys)


def test_rollback_is_a_length_and_later_tokens_overwrite() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 6, 1)
    pool.rollback(slot, 2)
    assert pool.length(slot) == 2
    fill(pool, slot, 2, 4, 9)
    assert pool.views(slot, 4, 4).keys[1][0, 0, :, 0].tolist() == [1, 1, 9, 9]


def test_a_fork_is_a_copy() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 3, 1)
    fork = pool.fork(slot)
    assert pool.length(fork) == 3
    fill(pool, slot, 3, 4, 2)
    pool.rollback(slot, 0)
    fill(pool, slot, 0, 3, 7)
    for tensor in (*pool.views(fork, 3, 3).keys, *pool.views(fork, 3, 3).values):
        assert bool((tensor == 1).all())


def test_layers_may_differ_in_heads_and_sizes() -> None:
    pool = make(kv_heads=[2, 1], head_dim=[4, 6])
    slot = pool.allocate()
    views = pool.views(slot, 0, 5)
    assert [tuple(tensor.shape) for tensor in views.keys] == [(2, 1, 5, 4), (1, 1, 5, 6)]
    assert [tuple(tensor.shape) for tensor in views.new] == [(2, 2, 5, 4), (2, 1, 5, 6)]
    fill(pool, slot, 0, 5, 3)
    fork = pool.fork(slot)
    assert all(bool((tensor == 3).all()) for tensor in pool.views(fork, 5, 5).values)


def test_memory_is_what_the_shape_says() -> None:
    assert make(kv_heads=[2, 1], head_dim=[4, 6]).memory_bytes == 4 * 2 * 3 * 8 * (2 * 4 + 1 * 6)


@pytest.mark.parametrize("slot", [-1, 1, 3])
def test_a_slot_that_is_not_taken_is_refused(slot: int) -> None:
    pool = make()
    pool.allocate()
    for method in (
        pool.length,
        pool.free,
        pool.fork,
        lambda slot: pool.rollback(slot, 0),
        lambda slot: pool.extend(slot, 1),
    ):
        with pytest.raises(ValueError, match=f"slot {slot} is not taken"):
            method(slot)
    pool.check_integrity()


def test_impossible_lengths_are_refused_with_both_numbers() -> None:
    pool = make()
    slot = pool.allocate()
    pool.extend(slot, 5)
    with pytest.raises(ValueError, match=r"holds 5 positions: .* rolled back to 6"):
        pool.rollback(slot, 6)
    with pytest.raises(ValueError, match="rolled back to -1"):
        pool.rollback(slot, -1)
    with pytest.raises(ValueError, match=r"holds 5 positions of 8: .* extended to 9"):
        pool.extend(slot, 9)
    with pytest.raises(ValueError, match="extended to 4"):
        pool.extend(slot, 4)
    assert pool.length(slot) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequences": 0}, "max_sequences must be at least 1, not 0"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"head_dim": [4, 4, 4]}, "head_dim names 3 layers of 2"),
    ],
    ids=str,
)
def test_an_impossible_pool_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_full_pool_refuses_a_fork_and_stays_whole() -> None:
    pool = make(max_sequences=1)
    slot = pool.allocate()
    with pytest.raises(PoolExhausted):
        pool.fork(slot)
    pool.check_integrity()
    assert pool.length(slot) == 0


def test_the_books_agree_after_any_use() -> None:
    rng = random.Random(5)
    pool = make(max_sequences=5)
    held: dict[int, int] = {}
    for _ in range(2000):
        match rng.choice(["allocate", "fork", "free", "extend", "rollback"]):
            case "allocate" if pool.free_slots:
                held[pool.allocate()] = 0
            case "fork" if pool.free_slots and held:
                slot = rng.choice(list(held))
                held[pool.fork(slot)] = held[slot]
            case "free" if held:
                slot = rng.choice(list(held))
                pool.free(slot)
                del held[slot]
            case "extend" if held:
                slot = rng.choice(list(held))
                held[slot] = rng.randint(held[slot], 8)
                pool.extend(slot, held[slot])
            case "rollback" if held:
                slot = rng.choice(list(held))
                held[slot] = rng.randint(0, held[slot])
                pool.rollback(slot, held[slot])
        pool.check_integrity()
        assert pool.free_slots == 5 - len(held)
        assert all(pool.length(slot) == length for slot, length in held.items())


def test_broken_books_are_told() -> None:
    twice, lost, long = make(), make(), make()
    twice._free.append(twice._free[0])
    with pytest.raises(PoolCorrupted, match="free twice"):
        twice.check_integrity()
    lost._free.pop()
    with pytest.raises(PoolCorrupted, match="free in one book"):
        lost.check_integrity()
    long._lengths[long.allocate()] = 9
    with pytest.raises(PoolCorrupted, match="claims 9 positions of 8"):
        long.check_integrity()
