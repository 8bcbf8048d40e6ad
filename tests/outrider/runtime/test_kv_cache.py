"""Sequences hold what was written to them, shared or not and wherever blocks lie; refusals; preemption; prefixes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from outrider.runtime.block_pool import BlockPool, PoolExhausted
from outrider.runtime.kv_cache import KVPool, PrefixCache, grow_with_preemption

BLOCK = 4


def make(blocks: int = 9, max_length: int = 12, kv_heads: int | list[int] = 2, head_dim: int | list[int] = 4) -> KVPool:
    memory: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "block_tokens": BLOCK}
    return KVPool(2, kv_heads, head_dim, blocks=blocks, max_length=max_length, **memory)


def fill(pool: KVPool, slot: int, start: int, end: int, value: float) -> None:
    for new in pool.views(slot, start, end).new:
        new.fill_(value)
    pool.extend(slot, end)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_impossible_lengths_are_refused_with_both_numbers() -> None:
    pool = make()
    slot, other = pool.allocate(), pool.allocate()
    fill(pool, slot, 0, 5, 1)
    for call, named in (
        (lambda: pool.rollback(slot, 6), r"holds 5 positions: .* rolled back to 6"),
        (lambda: pool.extend(slot, 9), r"holds 5 positions in blocks for 8: .* extended to 9"),
        (lambda: pool.grow(slot, 13), "grow to 13 positions: a sequence has 12 at most"),
        (lambda: pool.share(slot, [0], 4), "only an empty one shares blocks"),
        (lambda: pool.share(other, [0], 9), "9 positions lie in 3 blocks, not 1"),
    ):
        with pytest.raises(ValueError, match=named):
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
    assert [pool.blocks_needed(fork, length) for length in (6, 7, 8, 9)] == [0, 1, 1, 2], "its begun block is shared"
    pool.grow(fork, 7)
    with pytest.raises(PoolExhausted):
        pool.grow(fork, 9)
    pool.check_integrity()


def test_as_few_as_need_be_are_preempted_in_order_or_none() -> None:
    pool = make(blocks=4)
    slots = [pool.allocate() for _ in range(4)]
    for slot in slots[:3]:
        fill(pool, slot, 0, 4, slot)
    assert grow_with_preemption(pool, slots[3], 4, slots[:3]) == []
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 8, [slots[2], slots[0]]) == [slots[2]]
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 12, [slots[0]], spare=1) is None, "all would not suffice"
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]
    assert grow_with_preemption(pool, slots[3], 12, [slots[0]]) == [slots[0]]


# ------------------------------------------------------------------------------------------------------------- prefixes


def prefixes(blocks: int = 24) -> tuple[KVPool, PrefixCache]:
    pool = make(blocks, 24, [2, 1], [3, 5])
    return pool, PrefixCache(pool)


def write(pool: KVPool, slot: int, tokens: list[int]) -> None:
    """Write what a model would: at each position something that depends on all tokens up to it."""
    start = pool.length(slot)
    for layer, new in enumerate(pool.views(slot, start, len(tokens)).new):
        for i in range(start, len(tokens)):
            new[:, :, i - start] = value_of(tokens[: i + 1], layer)
    pool.extend(slot, len(tokens))


def value_of(tokens: list[int], layer: int) -> float:
    return float(hash((layer, *tokens)) % 65521)


def holds(pool: KVPool, slot: int, tokens: list[int]) -> bool:
    views = pool.views(slot, len(tokens), len(tokens))
    return all(
        bool((each[layer][:, 0, i] == value_of(tokens[: i + 1], layer)).all())
        for each in (views.keys, views.values)
        for layer in range(2)
        for i in range(len(tokens))
    )


def kept(pool: KVPool, cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """A slot with these tokens, in the cache."""
    slot = pool.allocate()
    cache.adopt(slot, tokens, salt)
    write(pool, slot, tokens)
    cache.keep(slot, tokens, salt)
    return slot


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_prefix_is_found_and_shared_also_after_its_sequence_has_ended(is_freed: bool) -> None:
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


def test_eviction_takes_the_least_recently_used_and_ends_before_beginnings() -> None:
    pool, cache = prefixes(blocks=5)
    texts = [[10 * n + i for i in range(9)] for n in range(2)]
    for tokens in texts:  # two full blocks each, and one that is not
        pool.free(kept(pool, cache, tokens))
    for lengths in ([8, 8], [4, 8], [0, 8], [0, 4]):
        pool.blocks.take()
        assert [cache.find(tokens) for tokens in texts] == lengths


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_operations_find_what_was_written(data: st.DataObject) -> None:
    """Texts over two tokens, so that they share much; a small pool, so that blocks are evicted all the time."""
    pool, cache = prefixes(blocks=data.draw(st.integers(6, 14)))
    running: list[tuple[int, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
        salt = data.draw(st.sampled_from(["", "a"]))
        slot = pool.allocate(data.draw(st.integers(0, 24)))
        length = cache.adopt(slot, tokens, salt)
        assert length % BLOCK == 0
        assert length < len(tokens)
        assert holds(pool, slot, tokens[:length])
        while running and pool.blocks_needed(slot, len(tokens)) > pool.blocks.num_free:
            pool.free(running.pop(0)[0])
        write(pool, slot, tokens)
        cache.keep(slot, tokens, salt)
        running.append((slot, tokens))
        if data.draw(st.booleans()):
            pool.free(running.pop()[0])
        assert all(holds(pool, *each) for each in running)
        pool.check_integrity()


# ---------------------------------------------------------------------------------------------------- random operations


class AnyUse(RuleBasedStateMachine):
    """Sequences are begun, forked, shared by name, extended, rolled back, preempted and ended in any order: each holds
    what was written to it, and every block is held by as many as should hold it.
    """

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.pool = make(blocks=8, max_length=24, kv_heads=1, head_dim=1)
        self.texts: dict[int, list[float]] = {}
        self.count = 0.0

    @rule(target=slots, expected=st.integers(0, 24))
    def allocate(self, expected: int) -> int:
        slot = self.pool.allocate(expected)
        self.texts[slot] = []
        return slot

    @rule(target=slots, slot=slots)
    def fork(self, slot: int) -> int:
        fork = self.pool.fork(slot)
        self.texts[fork] = list(self.texts[slot])
        return fork

    @rule(slot=consumes(slots))
    def free(self, slot: int) -> None:
        self.pool.free(slot)
        del self.texts[slot]

    @rule(slot=slots, count=st.integers(1, 9), is_committed=st.booleans())
    def extend(self, slot: int, count: int, is_committed: bool) -> None:
        text = self.texts[slot]
        end = min(len(text) + count, 24)
        if self.pool.blocks_needed(slot, end) > self.pool.blocks.num_free:
            with pytest.raises(PoolExhausted):
                self.pool.grow(slot, end)
            return
        new = [self.count + i for i in range(end - len(text))]
        self.count += len(new)
        for tensor in self.pool.views(slot, len(text), end).new:
            tensor[:, :, :, 0] = torch.tensor(new)
        if is_committed:  # otherwise the step failed
            self.pool.extend(slot, end)
            text += new

    @rule(slot=slots, share=st.floats(0, 1))
    def roll_back(self, slot: int, share: float) -> None:
        length = int(share * len(self.texts[slot]))
        self.pool.rollback(slot, length)
        del self.texts[slot][length:]

    @rule(slot=slots)
    def keep(self, slot: int) -> None:
        text = self.texts[slot]
        for i, block in enumerate(self.pool.block_table(slot)):
            if (i + 1) * BLOCK <= len(text):
                self.pool.blocks.cache(block, repr(text[: (i + 1) * BLOCK]).encode())

    @rule(slot=slots, other=slots)
    def share(self, slot: int, other: int) -> None:
        """An empty slot takes the cached blocks of another's text."""
        if self.texts[slot] or self.pool.block_table(slot):
            return
        text, found = self.texts[other], []
        for end in range(BLOCK, len(text) + 1, BLOCK):
            block = self.pool.blocks.find(repr(text[:end]).encode())
            if block is None:
                break
            found.append(block)
        self.pool.share(slot, found, len(found) * BLOCK)
        self.texts[slot] = text[: len(found) * BLOCK]

    @precondition(lambda self: len(self.texts) > 1)
    @rule(slot=slots, length=st.integers(1, 24))
    def grow_with_preemption(self, slot: int, length: int) -> None:
        if length <= len(self.texts[slot]):
            return
        victims = grow_with_preemption(self.pool, slot, length, [other for other in self.texts if other != slot])
        assert victims is not None, "all others together hold the rest of the pool"
        for victim in victims:
            self.texts[victim] = []

    @invariant()
    def every_sequence_holds_its_own(self) -> None:
        self.pool.check_integrity()
        for slot, text in self.texts.items():
            assert self.pool.length(slot) == len(text)
            if text:
                views = self.pool.views(slot, len(text), len(text))
                self.pool.check_integrity()
                for tensor in (*views.keys, *views.values):
                    assert tensor[0, 0, :, 0].tolist() == text

    def teardown(self) -> None:
        for slot in self.texts:
            self.pool.free(slot)
        self.pool.check_integrity()
        assert self.pool.used_blocks == 0


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_blocks_keep_their_counts_whatever_is_done() -> None:
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
