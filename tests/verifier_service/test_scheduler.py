"""The work of a step, preemption when blocks run out, and termination: on a real pool, without a model."""

import random

import pytest
import torch

from kernels.verify import Status, VerifyResult
from outrider.rpc.errors import internal
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.prefix_cache import PrefixCache
from protos.outrider.v1 import speculation_pb2
from tests.verifier_service.engines import a_round, make
from verifier_service import scheduler
from verifier_service.scheduler import IDLE_SECONDS, Plan, Scheduler
from verifier_service.sequence import MAX_BACKLOG, TargetSequence

BLOCK = 4


class Driver:
    """A scheduler. Its passes write each token into the pool; results accept a given number of tokens."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        max_batch_tokens: int = 16,
        max_sequences: int = 8,
        max_length: int = 128,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = KVPool(
            1, 1, 1, blocks=blocks, max_length=max_length, dtype=torch.float32, device="cpu", block_tokens=BLOCK
        )
        prefixes = PrefixCache(self.pool, enabled=prefix_cache)
        self.scheduler = Scheduler(self.pool, prefixes, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
        self.plans: list[Plan] = []
        self._prompts = iter(range(1, 10_000))

    def open(
        self, prompt: int = 3, *, output: int = 8, token: int = 0, isolated: bool = False, salt: str = ""
    ) -> TargetSequence:
        """A sequence with a prompt of one `token`, by default of its own."""
        tokens = [token or next(self._prompts)] * prompt
        sequence = make([], prompt=tokens, max_new_tokens=output, isolated=isolated, cache_salt=salt)
        self.scheduler.add(sequence)
        return sequence

    def submit(self, *sequences: TargetSequence, drafted: int = 2) -> None:
        for sequence in sequences:
            if not sequence.rounds and not sequence.finished:
                number = sequence.last_round + 1
                sequence.submit(a_round(number, sequence.tokens, [7] * drafted, seen=sequence.last_round))

    def run(self, accepted: int = 1) -> list[TargetSequence]:
        """Run one step. Return the sequences with a verdict."""
        plan = self.scheduler.plan([(each, each.next_round()) for each in self.scheduler.running])
        self.plans.append(plan)
        for item in plan.work:
            slot, start, end = item.chunk.slot, item.chunk.start, item.chunk.start + len(item.chunk.tokens)
            self.pool.grow_contiguous(slot, end)
            self.memory[0, 0, self.pool.slot_mapping(slot, start, end), 0] = torch.tensor(item.chunk.tokens).float()
            self.pool.extend(slot, end)
        for item in plan.work:
            if item.round is not None:
                drafted = len(item.sequence.drafted(item.round))
                result = VerifyResult(status=Status.OK, accepted=min(accepted, drafted), next_token=8, beta=())
                item.sequence.commit(
                    item.round, result, (), speculation_pb2.VerdictTimings, speculation_pb2.VerifierLoad()
                )
                item.sequence.num_written = item.sequence.num_replies
                self.scheduler.settle(item.sequence)
        self.pool.check_integrity()
        for each in self.scheduler.running:
            assert each.slot is not None
            if length := self.pool.length(each.slot):
                found = self.memory[0, 0, self.pool.slot_mapping(each.slot, 0, length), 0]
                assert found.tolist() == each.tokens[:length]
        return [item.sequence for item in plan.work if item.round is not None]

    @property
    def memory(self) -> torch.Tensor:
        assert self.pool.by_head is not None
        return self.pool.by_head.layers[0]

    @property
    def tokens(self) -> list[int]:
        """Width of each step."""
        return [sum(len(item.chunk.tokens) for item in plan.work) for plan in self.plans]

    def preempted(self) -> list[TargetSequence]:
        return [sequence for plan in self.plans for sequence in plan.preempted]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prompts_are_looked_up_only_in_a_prefix_cache(prefix_cache: bool) -> None:
    """The metrics count `Plan.looked_up`."""
    driver = Driver(prefix_cache=prefix_cache)
    for found in (0, 2 * BLOCK):
        sequence = driver.open(2 * BLOCK + 1, token=5)
        driver.submit(sequence)
        driver.run()
        assert driver.plans[-1].looked_up == ([(sequence, found)] if prefix_cache else [])
        assert driver.tokens[-1] == 2 * BLOCK + 3 - found * prefix_cache, "found tokens do not run again"
        driver.scheduler.remove(sequence)


def test_a_prompt_adopts_blocks_of_its_own_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, adopted, adopt = Driver(), list[tuple[str, int]](), PrefixCache.adopt

    def noted(cache: PrefixCache, slot: int, tokens: list[int], salt: str = "") -> int:
        adopted.append((salt, adopt(cache, slot, tokens, salt)))
        return adopted[-1][1]

    monkeypatch.setattr(PrefixCache, "adopt", noted)
    for salt in ("", "a", "b", "a"):
        sequence = driver.open(2 * BLOCK + 1, token=5, salt=salt)
        driver.submit(sequence)
        driver.run()
        driver.scheduler.remove(sequence)
    assert adopted == [("", 0), ("a", 0), ("b", 0), ("a", 2 * BLOCK)]


def test_a_long_prompt_delays_no_round_by_more_than_a_step() -> None:
    driver = Driver(max_batch_tokens=64, max_length=10_200, blocks=2900)
    quick = [driver.open(2, output=700) for _ in range(3)]
    driver.submit(*quick)
    driver.run()
    long = driver.open(10_000)
    driver.submit(long)
    passes = 0
    while driver.pool.length(long.slot or 0) < 9_990:
        driver.submit(*quick)
        judged = driver.run(accepted=0)
        assert {id(each) for each in quick} <= {id(each) for each in judged}
        passes += 1
    assert max(driver.tokens) <= 64
    assert passes == pytest.approx(10_000 / (64 - 3 * 3), rel=0.02), (
        "rounds take 9 tokens of each step, the prompt the rest"
    )


def test_a_round_longer_than_a_step_is_run_and_a_short_prompt_with_its_round() -> None:
    driver = Driver(max_batch_tokens=2)
    sequence = driver.open(1)
    driver.submit(sequence, drafted=5)
    assert driver.run() == [sequence]
    driver = Driver(max_batch_tokens=16)
    sequence = driver.open(9)
    driver.submit(sequence, drafted=3)
    assert driver.run() == [sequence]
    assert driver.tokens == [12]


@pytest.mark.parametrize(("step", "drafted"), [(4, 3), (4, 8), (1, 0)])
def test_a_prompt_gets_every_other_step_where_a_round_fills_one(step: int, drafted: int) -> None:
    driver = Driver(max_batch_tokens=step)
    busy = [driver.open(1, output=64) for _ in range(2)]
    driver.submit(*busy, drafted=drafted)
    driver.run()
    late = driver.open(2 * step + 1, output=1)
    served = list[int]()
    while not late.finished:
        driver.submit(*busy, drafted=drafted)
        driver.submit(late, drafted=0)
        assert len(served) < 8
        served.append(len(driver.run(accepted=0)))
    assert served == [1, 0, 1, 0, 1, 1, 1]


def test_sequences_take_turns_if_a_step_holds_few_rounds() -> None:
    driver = Driver(max_batch_tokens=7, max_sequences=16)
    many = [driver.open(1, output=90) for _ in range(8)]
    turns = []
    for _ in range(12):
        driver.submit(*many)
        turns += driver.run()
    counts = [turns.count(each) for each in many]
    assert (min(counts), max(counts)) == (3, 3), "12 passes of 2 rounds for 8 sequences"


@pytest.mark.parametrize("backlog", [MAX_BACKLOG - 1, MAX_BACKLOG])
def test_a_sequence_with_a_backlog_of_replies_pauses(backlog: int) -> None:
    driver = Driver()
    sequence = driver.open()
    driver.submit(sequence)
    sequence.num_replies = backlog
    assert driver.run() == ([sequence] if backlog < MAX_BACKLOG else [])


def test_a_finished_sequence_frees_its_blocks_before_its_stream_ends() -> None:
    driver = Driver()
    sequence = driver.open(9, output=2)
    driver.submit(sequence)
    driver.run(accepted=1)
    assert sequence.finished
    assert driver.pool.used_blocks == 0
    driver.scheduler.remove(sequence)
    assert not driver.scheduler.running


def test_a_prompt_begins_when_there_are_blocks_for_all_of_it() -> None:
    """Otherwise two prompts that fit one by one would block each other."""
    driver = Driver(blocks=10, max_batch_tokens=8)
    first, second = driver.open(24), driver.open(24)
    for _ in range(3):
        driver.run()
    assert driver.pool.length(first.slot or 0) == 23
    assert driver.pool.length(second.slot or 0) == 0
    assert not driver.preempted()
    driver.scheduler.remove(first)
    driver.run()
    assert driver.pool.length(second.slot or 0) == 8


@pytest.mark.parametrize("reads", [True, False])
def test_a_silent_sequence_is_preempted_first(reads: bool) -> None:
    """One that owes a round, or one with a round whose client reads no replies."""
    driver = Driver(blocks=8, max_batch_tokens=32, max_length=32)
    silent = driver.open(20, output=8)
    driver.submit(silent)
    driver.run()
    if not reads:
        driver.submit(silent)
        silent.num_replies += MAX_BACKLOG
    late = driver.open(16, output=8)
    driver.submit(late)
    silent.judged_at += 1000  # however slow this machine is
    assert driver.run() == [], "not at once: drafting takes time"
    assert driver.scheduler.is_short
    silent.judged_at -= 1000 + 2 * IDLE_SECONDS
    assert driver.run() == [late]
    assert driver.preempted() == [silent]
    while not late.finished:
        driver.submit(late)
        driver.run()
    silent.num_written = silent.num_replies
    driver.submit(silent)
    assert driver.run() == [silent]


def test_a_sequence_that_never_sent_a_round_is_preempted_and_prefills_again_with_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(blocks=8, max_batch_tokens=32, max_length=32)
    silent = driver.open(20, output=8)
    driver.run()
    assert driver.pool.length(silent.slot or 0) == 19
    late = driver.open(20, output=8)
    driver.submit(late)
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 1000.0)
    assert driver.run() == [], "not at once: drafting takes time"
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.0)
    assert driver.run() == [late]
    assert driver.preempted() == [silent]
    driver.run()
    assert driver.preempted() == [silent], "otherwise the two would preempt each other in turn"
    driver.submit(silent)
    assert driver.run() == [silent]


def test_a_failed_sequence_loses_its_blocks_though_rounds_were_left() -> None:
    """Its client may take long to read the error."""
    driver = Driver(blocks=8, max_batch_tokens=32, max_length=32)
    failed = driver.open(20)
    driver.submit(failed)
    driver.run()
    driver.submit(failed)
    failed.end(internal("INTERNAL", "an error"))
    failed.judged_at -= 2 * IDLE_SECONDS
    late = driver.open(20)
    driver.submit(late)
    assert driver.run() == [late]


def test_while_a_prompt_waits_for_blocks_no_newer_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it looked up in the prefix cache again in each step, which hashes all of it."""
    driver = Driver(blocks=10, max_batch_tokens=8)
    looked_up = list[TargetSequence]()
    adopt = driver.scheduler._adopt

    def noted(sequence: TargetSequence, slot: int) -> int:
        looked_up.append(sequence)
        return adopt(sequence, slot)

    monkeypatch.setattr(driver.scheduler, "_adopt", noted)
    first, second, small = driver.open(24), driver.open(24), driver.open(4)
    for _ in range(3):
        driver.run()
    assert driver.pool.length(first.slot or 0) == 23
    assert driver.pool.length(small.slot or 0) == 0
    assert second in looked_up
    assert small not in looked_up
    driver.scheduler.remove(second)
    driver.run()
    assert driver.pool.length(small.slot or 0) == 3


def test_resumed_sequences_go_first_but_not_for_ever() -> None:
    """Any client can say that it resumes a text."""
    driver = Driver(max_sequences=2)
    first = [driver.open() for _ in range(2)]
    new = driver.open()
    order = list[bool]()
    for _ in range(6):
        driver.scheduler.add(make([], prompt=[3], max_new_tokens=8, resumed=True))
    running = list(first)
    for _ in range(5):
        driver.scheduler.remove(running.pop())
        (started,) = [each for each in driver.scheduler.running if each not in running]
        running.append(started)
        order.append(started is new)
    assert order == [False, False, True, False, False]


def test_a_new_sequence_leaves_each_other_one_a_block() -> None:
    """Otherwise the next rounds of the others would preempt it."""
    driver = Driver(blocks=14, max_batch_tokens=64)
    others = [driver.open(11, output=12) for _ in range(2)]
    driver.submit(*others)
    driver.run()
    late = driver.open(20, output=4)
    driver.submit(*others)
    assert driver.run() == others
    assert driver.pool.blocks.num_free == 6, "one more than the new one needs"
    assert driver.pool.length(late.slot or 0) == 0
    while not all(each.finished for each in others):
        driver.submit(*others)
        driver.run()
    driver.submit(late)
    assert driver.run() == [late]
    assert not driver.preempted()


def test_a_sequence_that_needs_all_blocks_runs_though_its_prefix_is_cached() -> None:
    """Its own blocks are none that it would have to leave to another."""
    driver = Driver(blocks=8, max_batch_tokens=64, max_length=8 * BLOCK)
    first = driver.open(2 * BLOCK, token=5, output=1)
    driver.submit(first, drafted=0)
    driver.run()
    driver.scheduler.remove(first)
    second = driver.open(7 * BLOCK + 1, token=5)
    driver.submit(second)
    assert driver.run() == [second]


def test_victims_need_no_block_to_grow() -> None:
    """The oldest sequence, once preempted, gets the blocks of newer ones, though nearly all are needed."""
    driver = Driver(blocks=8, max_batch_tokens=64)
    oldest = driver.open(6 * BLOCK + 1)
    driver.submit(oldest, drafted=0)
    driver.run()
    assert oldest.slot is not None
    driver.pool.rollback(oldest.slot, 0)
    newer = [driver.open(BLOCK - 1), driver.open(BLOCK + 1)]
    driver.submit(*newer, drafted=0)
    assert set(driver.run()) == set(newer)
    driver.submit(oldest, drafted=0)
    assert driver.run() == [oldest]
    assert set(driver.preempted()) == set(newer)


def test_an_isolated_sequence_that_waits_for_blocks_leaves_its_turn_to_others() -> None:
    driver = Driver(blocks=8, max_batch_tokens=4)
    holder = driver.open(6 * BLOCK)
    driver.submit(holder, drafted=0)
    isolated = driver.open(6 * BLOCK, isolated=True)
    driver.submit(isolated, drafted=0)
    assert driver.scheduler.next_isolated() is isolated
    for _ in range(6):
        driver.run()
    assert all(plan.work for plan in driver.plans)


def test_the_longest_silent_sequence_is_preempted_first_and_then_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 1000.0)
    driver = Driver(blocks=11, max_batch_tokens=64)
    silent, growing, newer, newest = sequences = [driver.open(5, output=40) for _ in range(4)]
    driver.submit(*sequences)
    driver.run()
    assert driver.pool.used_blocks == 8, "two each"
    silent.judged_at -= 2000.0
    while len(driver.preempted()) < 3:
        driver.submit(growing)
        assert driver.run() == [growing]
    assert driver.preempted() == [silent, newest, newer]


@pytest.mark.parametrize("seed", range(6))
def test_all_sequences_end_and_the_oldest_is_never_preempted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", float("inf"))
    rng = random.Random(seed)
    driver = Driver(
        blocks=rng.choice([12, 16, 24]), max_batch_tokens=rng.choice([4, 16, 64]), max_length=48, max_sequences=6
    )
    here: list[TargetSequence] = []
    for step in range(1500):
        if step < 200 and rng.random() < 0.3 and len(here) < 12:
            here.append(driver.open(rng.randint(1, 30), output=rng.randint(1, 16)))
        for each in here:
            if rng.random() < 0.7:
                driver.submit(each, drafted=rng.randint(0, 4))
        before = len(driver.preempted())
        oldest = min(driver.scheduler.running, key=lambda each: each.arrival, default=None)
        driver.run(accepted=rng.randint(0, 4))
        assert oldest not in driver.preempted()[before:]
        for each in list(here):
            if each.finished or rng.random() < 0.01:
                driver.scheduler.remove(each)
                here.remove(each)
        if step > 200 and not here:
            break
    assert not here
    assert driver.pool.used_blocks == 0
    if seed == 0:
        assert driver.preempted()
