"""What is written is read, whoever shares it and wherever it lies; sizes, refusals, and the books."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from outrider.runtime.block_pool import PoolCorrupted, PoolExhausted
from outrider.runtime.kv_cache import KVPool, grow_with_preemption

BLOCK = 4


def make(blocks: int = 9, max_length: int = 12, kv_heads: int | list[int] = 2, head_dim: int | list[int] = 4) -> KVPool:
    return KVPool(
        2,
        kv_heads,
        head_dim,
        blocks=blocks,
        max_length=max_length,
        dtype=torch.float32,
        device="cpu",
        block_tokens=BLOCK,
    )


def fill(pool: KVPool, slot: int, start: int, end: int, value: float) -> None:
    for new in pool.views(slot, start, end).new:
        new.fill_(value)
    pool.extend(slot, end)


def held(pool: KVPool, slot: int) -> list[float]:
    """What a slot holds, position by position; the same in all layers, heads and positions."""
    length = pool.length(slot)
    views = pool.views(slot, length, length)
    tensors = [*views.keys, *views.values]
    for tensor in tensors:
        assert tensor.shape[1:3] == (1, length)
        assert bool((tensor == tensors[0][:1, :, :, :1]).all())
    return [float(value) for value in tensors[0][0, 0, :, 0]]


def crook(pool: KVPool) -> int:
    """A slot whose blocks lie apart, in a pool with no room to make it contiguous."""
    first, second = pool.allocate(), pool.allocate()
    for at in range(0, 8, BLOCK):
        fill(pool, first, at, at + BLOCK, 10 + at)
        fill(pool, second, at, at + BLOCK, 20 + at)
    pool.free(first)
    return second


# ------------------------------------------------------------------------------------------------- written and read


def test_what_is_written_is_read_and_nothing_beside_it() -> None:
    pool = make()
    first, second = pool.allocate(), pool.allocate()
    fill(pool, second, 0, 12, -1)
    fill(pool, first, 0, 3, 1)
    fill(pool, first, 3, 5, 2)
    views = pool.views(first, 5, 6)
    for tensor in (*views.keys, *views.values):
        assert tensor.shape == (2, 1, 6, 4)
        assert tensor[0, 0, :5, 0].tolist() == [1, 1, 1, 2, 2]
        assert tensor[1, 0].is_contiguous()
    assert held(pool, second) == [-1] * 12


def test_sequences_that_grow_side_by_side_is_contiguous() -> None:
    """Each was reserved a run for what it may come to hold."""
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


def test_blocks_that_lie_apart_are_gathered_and_written_where_they_belong() -> None:
    pool = make(blocks=4)
    slot = crook(pool)
    first, second = pool.block_table(slot)
    assert second != first + 1
    assert held(pool, slot) == [20] * 4 + [24] * 4
    fill(pool, slot, 8, 11, 3)
    assert pool.block_table(slot)[:2] == (first, second)
    assert held(pool, slot) == [20] * 4 + [24] * 4 + [3] * 3
    pool.check_integrity()


def test_what_a_broken_pass_wrote_to_gathered_blocks_is_lost() -> None:
    pool = make(blocks=4)
    slot = crook(pool)
    for new in pool.views(slot, 8, 10).new:
        new.fill_(99)
    fill(pool, slot, 8, 9, 1)
    assert held(pool, slot) == [20] * 4 + [24] * 4 + [1]


def test_nor_does_it_come_back_once_the_sequence_is_contiguous() -> None:
    pool = make(blocks=12)
    slot = crook(pool)
    others = [pool.allocate() for _ in range(3)]
    for other in others:
        fill(pool, other, 0, 12, 0)
    for new in pool.views(slot, 8, 9).new:
        new.fill_(99)
    for other in others:
        pool.free(other)
    fill(pool, slot, 8, 9, 1)
    assert held(pool, slot) == [20] * 4 + [24] * 4 + [1]


def test_where_enough_blocks_are_free_a_sequence_is_made_contiguous() -> None:
    pool = make(blocks=16)
    slot = crook(pool)
    fill(pool, slot, 8, 9, 3)
    first, *rest = pool.block_table(slot)
    assert rest == [first + 1, first + 2]
    assert held(pool, slot) == [20] * 4 + [24] * 4 + [3]
    pool.check_integrity()


def test_rollback_gives_blocks_back_and_later_tokens_overwrite() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 12, 1)
    pool.rollback(slot, 2)
    assert (pool.length(slot), pool.used_blocks) == (2, 1)
    fill(pool, slot, 2, 4, 9)
    assert held(pool, slot) == [1, 1, 9, 9]


def test_layers_may_differ_in_heads_and_sizes() -> None:
    pool = make(kv_heads=[2, 1], head_dim=[4, 6])
    slot = pool.allocate()
    views = pool.views(slot, 0, 5)
    assert [tuple(tensor.shape) for tensor in views.keys] == [(2, 1, 5, 4), (1, 1, 5, 6)]
    assert [tuple(tensor.shape) for tensor in views.new] == [(2, 2, 5, 4), (2, 1, 5, 6)]
    fill(pool, slot, 0, 5, 3)
    fork = pool.fork(slot)
    assert held(pool, fork) == [3] * 5


def test_memory_is_what_the_shape_says() -> None:
    assert make(blocks=9, kv_heads=[2, 1], head_dim=[4, 6]).memory_bytes == 4 * 2 * 9 * BLOCK * (2 * 4 + 1 * 6)


# ---------------------------------------------------------------------------------------------------------- sharing


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
    assert held(pool, fork) == [1] * 6 + [5] * 2
    pool.free(slot)
    assert held(pool, fork) == [1] * 6 + [5] * 2
    pool.check_integrity()


def test_a_shared_block_is_not_written_after_a_rollback_into_it() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 8, 1)
    fork = pool.fork(slot)
    pool.rollback(fork, 2)
    fill(pool, fork, 2, 4, 7)
    assert held(pool, slot) == [1] * 8
    assert held(pool, fork) == [1, 1, 7, 7]


def test_a_known_block_is_known_no_more_once_its_owner_writes_it_anew() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 4, 1)
    pool.blocks.cache(pool.block_table(slot)[0], b"ones")
    pool.rollback(slot, 2)
    fill(pool, slot, 2, 4, 2)
    assert pool.blocks.find(b"ones") is None
    pool.check_integrity()


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("slot", [-1, 1, 3])
def test_a_slot_that_is_not_taken_is_refused(slot: int) -> None:
    pool = make()
    pool.allocate()
    for method in (
        pool.length,
        pool.free,
        pool.fork,
        pool.block_table,
        lambda slot: pool.grow(slot, 1),
        lambda slot: pool.rollback(slot, 0),
        lambda slot: pool.extend(slot, 1),
    ):
        with pytest.raises(ValueError, match=f"slot {slot} is not taken"):
            method(slot)
    pool.check_integrity()


def test_impossible_lengths_are_refused_with_both_numbers() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 5, 1)
    with pytest.raises(ValueError, match=r"holds 5 positions: .* rolled back to 6"):
        pool.rollback(slot, 6)
    with pytest.raises(ValueError, match="rolled back to -1"):
        pool.rollback(slot, -1)
    with pytest.raises(ValueError, match=r"holds 5 positions in blocks for 8: .* extended to 9"):
        pool.extend(slot, 9)
    with pytest.raises(ValueError, match="extended to 4"):
        pool.extend(slot, 4)
    with pytest.raises(ValueError, match="grow to 13 positions: a sequence has 12 at most"):
        pool.grow(slot, 13)
    with pytest.raises(ValueError, match="only an empty one shares blocks"):
        pool.share(slot, [0], 4)
    with pytest.raises(ValueError, match="9 positions lie in 3 blocks, not 1"):
        pool.share(pool.allocate(), [0], 9)
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


def test_broken_books_are_told() -> None:
    twice, long, crooked = make(), make(), make()
    for pool in (twice, long, crooked):
        fill(pool, pool.allocate(), 0, 8, 1)
    twice._slots[0].block_table[1] = twice._slots[0].block_table[0]
    with pytest.raises(PoolCorrupted, match="2 hold it"):
        twice.check_integrity()
    long._slots[0].length = 9
    with pytest.raises(PoolCorrupted, match="claims 9 positions in 2 blocks"):
        long.check_integrity()
    crooked._slots[0].block_table.reverse()
    with pytest.raises(PoolCorrupted, match="claims to be contiguous"):
        crooked.check_integrity()
    crooked.reset()
    crooked.check_integrity()
    assert crooked.used_blocks == 0


# ------------------------------------------------------------------------------------------------------- preemption


def test_as_few_as_need_be_are_preempted_in_order() -> None:
    pool = make(blocks=4)
    slots = [pool.allocate() for _ in range(4)]
    for slot in slots[:3]:
        fill(pool, slot, 0, 4, slot)
    assert grow_with_preemption(pool, slots[3], 4, slots[:3]) == []
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 8, [slots[2], slots[0]]) == [slots[2]]
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]


def test_where_all_would_not_suffice_nobody_gives_way() -> None:
    pool = make(blocks=4)
    slots = [pool.allocate() for _ in range(3)]
    for slot in slots[:2]:
        fill(pool, slot, 0, 4, slot)
    assert grow_with_preemption(pool, slots[2], 12, [slots[0]], spare=1) is None
    assert [pool.length(slot) for slot in slots] == [4, 4, 0]
    assert grow_with_preemption(pool, slots[2], 12, [slots[0]]) == [slots[0]]


def test_a_block_that_two_share_is_free_only_when_both_are_preempted() -> None:
    pool = make(blocks=2)
    slot = pool.allocate()
    fill(pool, slot, 0, 8, 1)
    fork, other = pool.fork(slot), pool.allocate()
    assert grow_with_preemption(pool, other, 4, [slot]) is None
    assert grow_with_preemption(pool, other, 4, [slot, fork]) == [slot, fork]


# --------------------------------------------------------------------------------------------- whatever is done to it


class AnyUse(RuleBasedStateMachine):
    """Sequences that are begun, forked, shared by name, extended, rolled back, preempted and ended in any order: each
    holds what was written to it, the books agree, and every block is held by as many as should hold it.
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

    @rule(slot=slots, count=st.integers(1, 9), written=st.booleans())
    def extend(self, slot: int, count: int, written: bool) -> None:
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
        if written:  # otherwise the pass broke
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
        """What an empty slot finds by the text of another is that text."""
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
        victims = [other for other in self.texts if other != slot]
        given = grow_with_preemption(self.pool, slot, length, victims)
        assert given is not None, "all others together hold the rest of the pool"
        for victim in given:
            self.texts[victim] = []

    @invariant()
    def every_sequence_holds_its_own(self) -> None:
        self.pool.check_integrity()
        assert {slot: self.pool.length(slot) for slot in self.texts} == {
            slot: len(text) for slot, text in self.texts.items()
        }
        for slot, text in self.texts.items():
            self.pool.check_integrity()
            if text:
                views = self.pool.views(slot, len(text), len(text))
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
