"""Sequences keep their keys and values, shared or not; full pools refuse or preempt; prefixes are found again."""

import random
from functools import cache
from typing import Any

import pytest
import torch

from outrider.runtime.block_pool import PoolExhausted
from outrider.runtime.kv_cache import KVPool, grow_with_preemption
from outrider.runtime.prefix_cache import PrefixCache

BLOCK = 4


def make(blocks: int = 9, max_length: int = 12, kv_heads: int | list[int] = 2, head_dim: int | list[int] = 4) -> KVPool:
    memory: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "block_tokens": BLOCK}
    return KVPool(2, kv_heads, head_dim, blocks=blocks, max_length=max_length, **memory)


def fill(pool: KVPool, slot: int, start: int, end: int, value: float) -> None:
    pool.grow_contiguous(slot, end)
    for memory in layers(pool):
        memory[:, :, pool.slot_mapping(slot, start, end)] = value
    pool.extend(slot, end)


def layers(pool: KVPool) -> list[torch.Tensor]:
    """Keys and values of all positions, `[2, kv_heads, positions, head_dim]` of each layer."""
    assert pool.by_head is not None
    return pool.by_head.layers


# ------------------------------------------------------------------------------------------------------------- refusals


def test_impossible_lengths_are_refused_with_both_numbers() -> None:
    pool = make()
    slot, other = pool.allocate(), pool.allocate()
    fill(pool, slot, 0, 5, 1)
    for call, message in (
        (lambda: pool.rollback(slot, 6), r"holds 5 positions; .* rolled back to 6"),
        (lambda: pool.extend(slot, 9), r"holds 5 positions in blocks for 8; .* extended to 9"),
        (lambda: pool.grow(slot, 13), "grow to 13 positions; max_length is 12"),
        (lambda: pool.share(slot, [0], 4), "only an empty one shares blocks"),
        (lambda: pool.share(other, [0], 9), "9 positions need 3 blocks; 1 were given"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert pool.length(slot) == 5


def test_a_full_pool_refuses_and_stays_as_it_was() -> None:
    pool = make(blocks=3)
    slot, other = pool.allocate(), pool.allocate()
    fill(pool, slot, 0, 6, 1)
    with pytest.raises(PoolExhausted, match=r"needs 2 more blocks for 8 positions; 1 of 3 are free"):
        pool.grow(other, 8)
    assert pool.used_blocks == 2
    fork = pool.fork(slot)
    assert [pool.blocks_needed(fork, length) for length in (6, 7, 8, 9)] == [0, 1, 1, 2], "its last block is shared"
    pool.grow(fork, 7)
    with pytest.raises(PoolExhausted):
        pool.grow(fork, 9)
    pool.check_integrity()


def test_no_more_sequences_are_preempted_than_needed() -> None:
    pool = make(blocks=4)
    slots = [pool.allocate() for _ in range(4)]
    for slot in slots[:3]:
        fill(pool, slot, 0, 4, slot)
    assert grow_with_preemption(pool, slots[3], 4, slots[:3]) == []
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 8, [slots[2], slots[0]]) == [slots[2]]
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 12, [slots[0]], spare=2) is None, "all would not suffice"
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]
    assert grow_with_preemption(pool, slots[3], 12, [slots[0]], spare=1) == [slots[0]], "a victim needs no block"


# ------------------------------------------------------------------------------------------------------------- prefixes


def prefixes(blocks: int = 24) -> tuple[KVPool, PrefixCache]:
    pool = make(blocks, 24, [2, 1], [3, 5])
    return pool, PrefixCache(pool)


@cache
def values_of(tokens: tuple[int, ...], layer: int) -> torch.Tensor:
    """Stand-ins for keys and values: each depends on the layer and on all tokens up to its own. `[n, 1]`."""
    values = [hash((layer, *tokens[: i + 1])) % 65521 for i in range(len(tokens))]
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def write(pool: KVPool, slot: int, tokens: list[int]) -> None:
    """Write the positions of these tokens that the slot lacks, without extending it."""
    start = pool.length(slot)
    pool.grow_contiguous(slot, len(tokens))
    for layer, memory in enumerate(layers(pool)):
        memory[:, :, pool.slot_mapping(slot, start, len(tokens))] = values_of(tuple(tokens), layer)[start:]


def holds(pool: KVPool, slot: int, tokens: list[int]) -> bool:
    return pool.length(slot) == len(tokens) and all(
        bool((memory[:, :, pool.slot_mapping(slot, 0, len(tokens))] == values_of(tuple(tokens), layer)).all())
        for layer, memory in enumerate(layers(pool))
    )


def kept(pool: KVPool, cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """A slot with these tokens, in the cache."""
    slot = pool.allocate()
    cache.adopt(slot, tokens, salt)
    write(pool, slot, tokens)
    pool.extend(slot, len(tokens))
    cache.keep(slot, tokens, salt)
    return slot


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_prefix_is_shared_even_after_its_sequence_has_ended(is_freed: bool) -> None:
    pool, cache = prefixes()
    tokens = list(range(10))
    slot = kept(pool, cache, tokens)
    table = pool.block_table(slot)[:2]
    if is_freed:
        pool.free(slot)
    assert pool.used_blocks == (0 if is_freed else 3)
    other = pool.allocate()
    assert cache.adopt(other, [*range(8), 99, 98]) == pool.length(other) == 8
    assert pool.block_table(other) == table
    assert pool.used_blocks == (2 if is_freed else 3)
    assert holds(pool, other, tokens[:8])


def test_blocks_that_are_not_written_whole_are_not_shared() -> None:
    """The last token of a sequence has not run after a verdict, and blocks of a prompt grow before it runs."""
    pool, cache = prefixes()
    slot, tokens = pool.allocate(), list(range(2 * BLOCK))
    pool.grow_contiguous(slot, 3 * BLOCK)
    write(pool, slot, tokens[:-1])
    pool.extend(slot, len(tokens) - 1)
    cache.keep(slot, tokens)
    assert cache.find([*tokens, 9]) == BLOCK


def test_a_shared_prefix_is_not_copied_over_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when the sequence grows after it, nor when its rounds are rolled back."""
    memory: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "block_tokens": BLOCK, "paged": True}
    pool = KVPool(2, 2, 4, blocks=9, max_length=20, **memory)
    cache, tokens, copied = PrefixCache(pool), list(range(10)), list[int]()
    assert pool.paged is not None
    monkeypatch.setattr(pool.paged, "copy", lambda old, new: copied.extend(old))
    slot, other = pool.allocate(), pool.allocate()
    pool.grow(slot, 10)
    pool.extend(slot, 10)
    cache.keep(slot, tokens)
    assert cache.adopt(other, tokens) == 8
    for length in (11, 9, 16, 8, 20):
        if length > pool.length(other):
            pool.grow(other, length)
            pool.extend(other, length)
        else:
            pool.rollback(other, length)
        assert pool.block_table(other)[:2] == pool.block_table(slot)[:2]
    assert copied == []
    pool.rollback(other, 6)
    pool.grow(other, 7)
    assert copied == [pool.block_table(slot)[1]], "a write into the prefix needs a block of its own"


def test_whole_blocks_of_equal_tokens_are_found_but_the_last_token() -> None:
    """The last token has to be run, for its logits."""
    pool, cache = prefixes()
    kept(pool, cache, list(range(12)))
    kept(pool, cache, list(range(50, 59)), "one tenant")
    for tokens, found in (
        (list(range(8)), 4),
        (list(range(9)), 8),
        ([7, *range(1, 13)], 0),
        ([0, 1, 2, 3, 9, *range(5, 13)], 4),
        (list(range(50, 59)), 0),
    ):
        assert cache.find(tokens) == found
    assert [cache.find(list(range(50, 59)), salt) for salt in ("another", "one tenant")] == [0, 8]
    disabled = PrefixCache(pool, enabled=False)
    kept(pool, disabled, list(range(8)))
    assert disabled.find(list(range(9))) == 0


def test_a_cached_block_is_forgotten_when_its_owner_writes_it_again() -> None:
    pool, cache = prefixes()
    slot = kept(pool, cache, list(range(8)))
    pool.rollback(slot, 2)
    write(pool, slot, [0, 1, 50])
    assert cache.find(list(range(9))) == 0


def test_eviction_is_least_recently_used_and_from_the_end_of_a_text() -> None:
    pool, cache = prefixes(blocks=5)
    texts = [[10 * n + i for i in range(9)] for n in range(2)]
    for tokens in texts:  # two full blocks each, and one that is not
        pool.free(kept(pool, cache, tokens))
    for lengths in ([8, 8], [4, 8], [0, 8], [0, 4]):
        pool.blocks.take()
        assert [cache.find(tokens) for tokens in texts] == lengths


# ---------------------------------------------------------------------------------------------------- random operations


def extended(pool: KVPool, slot: int, text: list[int], rng: random.Random) -> list[int]:
    """Extend a slot at random; return its text, which is the same where the pool is full or the step fails."""
    longer = [*text, *rng.choices((0, 1), k=rng.randint(1, 9))][:24]
    if pool.blocks_needed(slot, len(longer)) > pool.blocks.num_free:
        with pytest.raises(PoolExhausted):
            pool.grow(slot, len(longer))
        return text
    write(pool, slot, longer)
    if rng.random() < 0.2:
        return text
    pool.extend(slot, len(longer))
    return longer


@pytest.mark.parametrize("blocks", [8, 48])
def test_sequences_keep_their_values_under_random_operations(blocks: int) -> None:
    """Texts over two tokens, so that they share much. In a small pool blocks are evicted all the time; in a larger one
    sequences move to consecutive blocks.
    """
    rng, hits = random.Random(5), 0
    pool, cache = prefixes(blocks=blocks)
    texts: dict[int, list[int]] = {}
    operations = ["extend", "keep", "adopt"] * 3 + ["fork", "free", "roll back", "preempt"]
    for _ in range(1500):
        if not texts or (len(texts) < 5 and rng.random() < 0.1):
            texts[pool.allocate(rng.randint(0, 24))] = []
        slot, other = rng.choice(list(texts)), rng.choice(list(texts))
        text = texts[slot]
        match rng.choice(operations):
            case "extend":
                texts[slot] = extended(pool, slot, text, rng)
            case "fork" if len(texts) < 5:
                texts[pool.fork(slot)] = list(text)
            case "free":
                pool.free(slot)
                del texts[slot]
            case "roll back":
                texts[slot] = text[: rng.randint(0, len(text))]
                pool.rollback(slot, len(texts[slot]))
            case "keep":
                cache.keep(slot, text)
            case "adopt" if len(texts) < 5:
                slot, tokens = pool.allocate(24), [*texts[other], rng.randint(0, 1)]
                length = cache.adopt(slot, tokens)
                assert length % BLOCK == 0
                assert length < len(tokens)
                texts[slot] = tokens[:length]
                hits += length > 0
            case "preempt":
                victims = [each for each in texts if each != slot]
                preempted = grow_with_preemption(pool, slot, rng.randint(len(text), 24), victims)
                assert preempted is not None, "all others together hold the rest of the pool"
                texts |= {victim: [] for victim in preempted}
        pool.check_integrity()
        assert pool.used_blocks == len({block for each in texts for block in pool.block_table(each)})
        assert all(holds(pool, *each) for each in texts.items())
    assert hits > 20
    for slot in texts:
        pool.free(slot)
    assert pool.used_blocks == 0
