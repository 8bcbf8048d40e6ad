"""Sequences read their own writes, shared or not and wherever blocks lie; refusals; preemption; prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from outrider.runtime.block_pool import PoolCorrupted, PoolExhausted
from outrider.runtime.kv_cache import KVPool, PrefixCache, grow_with_preemption

BLOCK = 4


def make(blocks: int = 9, max_length: int = 12, kv_heads: int | list[int] = 2, head_dim: int | list[int] = 4) -> KVPool:
    memory: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "block_tokens": BLOCK}
    return KVPool(2, kv_heads, head_dim, blocks=blocks, max_length=max_length, **memory)


def fill(pool: KVPool, slot: int, start: int, end: int, value: float) -> None:
    for new in pool.views(slot, start, end).new:
        new.fill_(value)
    pool.extend(slot, end)


def held(pool: KVPool, slot: int) -> list[float]:
    """Return the numbers of a slot, position by position; the same in all layers and heads."""
    length = pool.length(slot)
    views = pool.views(slot, length, length)
    tensors = [*views.keys, *views.values]
    for tensor in tensors:
        assert tensor.shape[1:3] == (1, length)
        assert bool((tensor == tensors[0][:1, :, :, :1]).all())
    return [float(value) for value in tensors[0][0, 0, :, 0]]


def scattered(pool: KVPool) -> int:
    """A slot of 8 positions whose blocks lie apart, in a pool with no room to make it contiguous."""
    first, second = pool.allocate(), pool.allocate()
    for at in range(0, 8, BLOCK):
        fill(pool, first, at, at + BLOCK, 10 + at)
        fill(pool, second, at, at + BLOCK, 20 + at)
    pool.free(first)
    return second


SCATTERED = [20.0] * 4 + [24.0] * 4


# ----------------------------------------------------------------------------------------------------- written and read


def test_a_slot_reads_its_own_writes_alone() -> None:
    pool = make()
    first, second = pool.allocate(), pool.allocate()
    fill(pool, second, 0, 12, -1)
    fill(pool, first, 0, 3, 1)
    fill(pool, first, 3, 5, 2)
    views = pool.views(first, 5, 6)
    for tensor in (*views.keys, *views.values):
        assert (tensor.shape, tensor[0, 0, :5, 0].tolist()) == ((2, 1, 6, 4), [1, 1, 1, 2, 2])
        assert tensor[1, 0].is_contiguous()
    assert held(pool, second) == [-1] * 12


def test_sequences_that_grow_side_by_side_are_contiguous() -> None:
    pool = make(blocks=9)
    slots = [pool.allocate(expected=12) for _ in range(3)]
    for at in range(0, 12, BLOCK):
        for slot in slots:
            fill(pool, slot, at, at + BLOCK, slot)
    for slot in slots:
        first, *rest = pool.block_table(slot)
        assert rest == [first + 1, first + 2]
        assert held(pool, slot) == [slot] * 12
    pool.check_integrity()


@pytest.mark.parametrize(("blocks", "is_contiguous"), [(4, False), (16, True)])
def test_scattered_blocks_are_gathered_or_made_contiguous_where_there_is_room(blocks: int, is_contiguous: bool) -> None:
    pool = make(blocks)
    slot = scattered(pool)
    before = pool.block_table(slot)
    assert held(pool, slot) == SCATTERED
    fill(pool, slot, 8, 11, 3)
    assert held(pool, slot) == [*SCATTERED, 3, 3, 3]
    first, second, third = pool.block_table(slot)
    assert ((second, third) == (first + 1, first + 2)) == is_contiguous
    assert is_contiguous or before == (first, second)
    pool.check_integrity()


@pytest.mark.parametrize("blocks", [4, 12])
def test_gathered_blocks_lose_the_writes_of_a_failed_step(blocks: int) -> None:
    """Also where the sequence becomes contiguous in between."""
    pool = make(blocks)
    slot = scattered(pool)
    others = [pool.allocate() for _ in range(blocks // 4)]
    if blocks == 12:
        for other in others:
            fill(pool, other, 0, 12, 0)
    for new in pool.views(slot, 8, 9).new:
        new.fill_(99)
    for other in others:
        pool.free(other)
    fill(pool, slot, 8, 9, 1)
    assert held(pool, slot) == [*SCATTERED, 1]


def test_layers_may_differ_in_heads_and_sizes() -> None:
    pool = make(kv_heads=[2, 1], head_dim=[4, 6])
    assert pool.memory_bytes == 4 * 2 * 9 * BLOCK * (2 * 4 + 1 * 6)
    slot = pool.allocate()
    views = pool.views(slot, 0, 5)
    assert [tuple(tensor.shape) for tensor in views.keys] == [(2, 1, 5, 4), (1, 1, 5, 6)]
    assert [tuple(tensor.shape) for tensor in views.new] == [(2, 2, 5, 4), (2, 1, 5, 6)]
    fill(pool, slot, 0, 5, 3)
    assert held(pool, pool.fork(slot)) == [3] * 5


def test_a_fork_shares_until_either_writes() -> None:
    pool = make(blocks=4)  # too few for either to move into a run of its own
    slot = pool.allocate()
    fill(pool, slot, 0, 6, 1)
    fork = pool.fork(slot)
    assert pool.used_blocks == 2
    fill(pool, slot, 6, 7, 2)  # copies the block that both have begun
    assert pool.used_blocks == 3
    fill(pool, fork, 6, 8, 5)  # is alone by now, and copies nothing
    assert pool.used_blocks == 3
    assert held(pool, slot) == [1] * 6 + [2]
    pool.free(slot)
    assert held(pool, fork) == [1] * 6 + [5] * 2
    pool.check_integrity()


def test_rollback_frees_blocks_and_leaves_shared_ones_as_they_were() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 12, 1)
    fork = pool.fork(slot)
    pool.rollback(fork, 2)
    fill(pool, fork, 2, 4, 7)
    assert held(pool, slot) == [1] * 12
    assert held(pool, fork) == [1, 1, 7, 7]
    pool.free(slot)
    assert (pool.length(fork), pool.used_blocks) == (4, 1)


def test_a_cached_block_is_forgotten_once_its_owner_writes_it_anew() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 4, 1)
    pool.blocks.cache(pool.block_table(slot)[0], b"ones")
    pool.rollback(slot, 2)
    fill(pool, slot, 2, 4, 2)
    assert pool.blocks.find(b"ones") is None
    pool.check_integrity()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("slot", [-1, 1, 3])
@pytest.mark.parametrize("method", ["length", "free", "fork", "block_table", "grow", "rollback", "extend"])
def test_a_slot_that_is_not_allocated_is_refused(method: str, slot: int) -> None:
    pool = make()
    pool.allocate()
    with pytest.raises(ValueError, match=f"slot {slot} is not taken"):
        getattr(pool, method)(slot, *[1] * (method in ("grow", "rollback", "extend")))
    pool.check_integrity()


def test_impossible_lengths_are_refused_with_both_numbers() -> None:
    pool = make()
    slot, other = pool.allocate(), pool.allocate()
    fill(pool, slot, 0, 5, 1)
    for call, named in (
        (lambda: pool.rollback(slot, 6), r"holds 5 positions: .* rolled back to 6"),
        (lambda: pool.rollback(slot, -1), "rolled back to -1"),
        (lambda: pool.extend(slot, 9), r"holds 5 positions in blocks for 8: .* extended to 9"),
        (lambda: pool.extend(slot, 4), "extended to 4"),
        (lambda: pool.grow(slot, 13), "grow to 13 positions: a sequence has 12 at most"),
        (lambda: pool.share(slot, [0], 4), "only an empty one shares blocks"),
        (lambda: pool.share(other, [0], 9), "9 positions lie in 3 blocks, not 1"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert pool.length(slot) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 0}, "blocks must be at least 1, not 0"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"head_dim": [4, 4, 4]}, "head_dim names 3 layers of 2"),
    ],
    ids=str,
)
def test_an_impossible_pool_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


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
    assert held(pool, slot) == [1] * 6
    pool.check_integrity()


def test_corruption_is_noticed() -> None:
    twice, long, reversed_ = make(), make(), make()
    for pool in (twice, long, reversed_):
        fill(pool, pool.allocate(), 0, 8, 1)
    twice._slots[0].block_table[1] = twice._slots[0].block_table[0]
    long._slots[0].length = 9
    reversed_._slots[0].block_table.reverse()
    messages = "2 hold it", "claims 9 positions in 2 blocks", "claims to be contiguous"
    for pool, named in zip((twice, long, reversed_), messages, strict=True):
        with pytest.raises(PoolCorrupted, match=named):
            pool.check_integrity()
    reversed_.reset()
    reversed_.check_integrity()
    assert reversed_.used_blocks == 0


# ----------------------------------------------------------------------------------------------------------- preemption


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


def test_a_shared_block_is_free_only_when_both_holders_are_preempted() -> None:
    pool = make(blocks=2)
    slot = pool.allocate()
    fill(pool, slot, 0, 8, 1)
    fork, other = pool.fork(slot), pool.allocate()
    assert grow_with_preemption(pool, other, 4, [slot]) is None
    assert grow_with_preemption(pool, other, 4, [slot, fork]) == [slot, fork]


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


def test_a_held_prefix_is_not_evicted() -> None:
    pool, cache = prefixes(blocks=6)
    tokens = list(range(9))
    pool.free(kept(pool, cache, tokens))
    slot = pool.allocate()
    cache.adopt(slot, tokens)
    write(pool, pool.allocate(), list(range(50, 66)))
    assert holds(pool, slot, tokens[:8])
    assert cache.find(tokens) == 8
    with pytest.raises(ValueError, match=r"slot \d holds 8 positions; only an empty one shares blocks"):
        cache.adopt(slot, tokens)


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
