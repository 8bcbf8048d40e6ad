"""The draft's engine: proposals have the draft's distribution, after any verdict and in any batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.base import DraftError, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.sequence import Close, DraftWork, Propose
from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import NO_LOGITS, Sample, SamplingParams, probabilities
from kernels.sigmoid import EXCLUDED, DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.prefix_cache import PrefixCache
from outrider.runtime.torch_runner import TorchRunner
from tests.draft_service.engines import CONFIG, PLAIN, PROMPT, VOCABULARY, Driver, engine_of, running, sequence
from tests.draft_service.pairs import DEMO
from tests.kernels.cases import sparsify
from tests.kernels.reference import coupled_choice, standardise


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    with running(engine_of(loaded)) as engine:
        yield engine


def reference(model: ModelRunner, tokens: list[int], opening: DraftSequence, gamma: int) -> list[int]:
    """γ tokens drafted one by one, with a prefill of the whole prefix for each."""
    base, params = len(tokens), opening.draft_params
    for index in range(gamma):
        slot = model.pool.allocate()
        logits = model.forward([Chunk(slot, tokens, 0, len(tokens) - 1)])[:, :VOCABULARY]
        model.pool.free(slot)
        if params.is_greedy:
            tokens = [*tokens, int(logits.argmax())]
        elif opening.rule is Rule.COUPLED:
            tokens = [
                *tokens,
                coupled_choice(standardise(logits[0].double().numpy(), params), opening.seed, len(tokens)),
            ]
        else:
            (q,) = sparsify(probabilities(logits, params), CONFIG)
            tokens = [*tokens, q.token_at(uniform(opening.seed, base, index, Domain.DRAFT))]
    return tokens[base:]


@pytest.fixture(scope="module")
def loaded_again() -> LoadedModel:
    """For this thread: only one may use a model."""
    return load_model(ModelSource(str(DEMO / "draft"), dtype="float32", device="cpu"))


@pytest.fixture
def fresh(loaded_again: LoadedModel) -> ModelRunner:
    return TorchRunner.build(loaded_again, max_sequences=1, max_length=96)


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_temperature", [None, 0.0, 2.0])
def test_drafts_equal_the_reference_over_many_rounds(
    engine: DraftEngine, fresh: ModelRunner, temperature: float, rule: Rule, draft_temperature: float | None
) -> None:
    """Verdicts accept all, some and none of a proposal, and add more. Distributions sent are those drawn from
    (invariant 1).
    """
    opening = replace(sequence(temperature, rule=rule), draft_temperature=draft_temperature)
    driver, tokens, committed = Driver(engine, opening), list(PROMPT), list[int]()
    for accepted in (5, 0, 2, 5, 5, 1, 4):
        draft = driver.propose(5, committed)
        assert draft.token_ids == reference(fresh, tokens, opening, 5)
        if rule is Rule.COUPLED:
            assert draft.distributions == []
        elif opening.draft_params.is_greedy:
            assert draft.distributions == [None] * 5
        else:
            for index, (token, q_hat) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
                assert isinstance(q_hat, SparseDistribution)
                assert token == q_hat.token_at(uniform(opening.seed, len(tokens), index, Domain.DRAFT))
                assert q_hat.total == int(q_hat.weights.sum(dtype=np.int64))
        committed = [*draft.token_ids[:accepted], 11 + accepted, *([12, 13] if accepted == 2 else [])]
        tokens += committed


def test_sigmoid_sends_the_same_tokens_with_the_models_logits(engine: DraftEngine, fresh: ModelRunner) -> None:
    opening = sequence(rule=Rule.SIGMOID, params=SamplingParams(temperature=0.8, top_k=30))
    draft = Driver(engine, opening).propose(6)
    assert draft.token_ids == Driver(engine, replace(opening, rule=Rule.TOKENWISE)).propose(6).token_ids
    slot = fresh.pool.allocate()
    z = fresh.forward([Chunk(slot, [*PROMPT, *draft.token_ids[:-1]], 0, len(PROMPT) - 1)])[:, :VOCABULARY] / 0.8
    for row, token, logits in zip(z, draft.token_ids, draft.distributions, strict=True):
        assert isinstance(logits, DraftLogits)
        assert (logits.values.dtype, logits.values.shape) == (torch.float16, (VOCABULARY,))
        inside = logits.values != EXCLUDED
        assert inside[token]
        assert inside.nonzero().flatten().tolist() == sorted(row.topk(30).indices.tolist())
        assert logits.values[inside].float() == pytest.approx(row[inside], abs=0.02)  # 16 bits of logits up to 32


def test_padding_is_never_drafted(loaded: LoadedModel, fresh: ModelRunner) -> None:
    """The target's vocabulary ends at the draft's likeliest token."""
    logits = fresh.forward([Chunk(fresh.pool.allocate(), PROMPT, 0, len(PROMPT) - 1)])[0]
    end = int(logits.argmax())
    with running(engine_of(loaded, vocab_size=end)) as engine:
        drafted = Driver(engine, sequence(0.0)).propose(6).token_ids
    assert drafted[0] == int(logits[:end].argmax())
    assert max(drafted) < end


def test_a_target_may_know_more_tokens_than_the_draft_has(loaded: LoadedModel) -> None:
    """It drafts its own tokens, in one call as by steps."""
    vocab_size = loaded.vocab_size + 7
    with running(engine_of(loaded, vocab_size=vocab_size)) as wide:
        lone, *both = [Driver(wide, sequence(rule=Rule.COUPLED)) for _ in range(3)]
        alone = lone.propose(6).token_ids
        for driver in both:
            driver.request(6)
        assert [driver.result().token_ids for driver in both] == [alone] * 2
        opening = sequence(rule=Rule.SIGMOID, params=SamplingParams())
        (logits,) = Driver(wide, opening).propose(1).distributions
    assert isinstance(logits, DraftLogits)
    assert (logits.values == EXCLUDED).tolist() == [False] * loaded.vocab_size + [True] * 7


def test_penalties_count_drafted_tokens_until_they_are_rejected(engine: DraftEngine) -> None:
    """With the highest presence penalty no token comes twice, drafted or committed."""
    driver = Driver(engine, sequence(0.0, logit_rules=LogitRules(presence_penalty=100.0)))
    first = driver.propose(8).token_ids
    assert len(set(first)) == 8
    committed = [*first[:2], 11]
    second = driver.propose(8, committed).token_ids
    assert not set(second) & set(committed)
    fresh = Driver(engine, sequence(0.0, committed=committed, logit_rules=LogitRules(presence_penalty=100.0)))
    assert fresh.propose(8).token_ids == second


@pytest.mark.parametrize("max_entropy", [None, 1.5])
@pytest.mark.parametrize("rules", [PLAIN, LogitRules(presence_penalty=1.0)], ids=["plain", "adjusted"])
def test_drafts_do_not_depend_on_the_batch_and_an_entropy_bound_shortens_them(
    engine: DraftEngine, rules: LogitRules, max_entropy: float | None
) -> None:
    """Four sequences of different rules and temperatures draft the tokens of each alone, in one call or by steps.

    A bound on entropy leaves a prefix of them.
    """
    kinds = [(1.0, Rule.COUPLED), (1.0, Rule.TOKENWISE), (0.7, Rule.SIGMOID), (0.0, Rule.COUPLED)]
    openings = [
        sequence(temperature, seed=seed, prompt=PROMPT[seed:], rule=rule, logit_rules=rules, max_entropy=max_entropy)
        for seed, (temperature, rule) in enumerate(kinds)
    ]
    alone = []
    for each in openings:
        driver = Driver(engine, replace(each, max_entropy=None))
        alone.append(driver.propose(6))
        driver.close()
    drivers = [Driver(engine, each) for each in openings]
    for driver in drivers:
        driver.request(6)
    drafts = [driver.result() for driver in drivers]
    for draft, own in zip(drafts, alone, strict=True):
        assert draft.error is None
        size = len(draft.token_ids)
        assert draft.token_ids == own.token_ids[:size]
        for q_hat, same in zip(draft.distributions, own.distributions[:size], strict=True):
            assert type(q_hat) is type(same)
            if isinstance(q_hat, DraftLogits) and isinstance(same, DraftLogits):  # rounding depends on the width
                assert q_hat.values.float() == pytest.approx(same.values.float(), abs=0.02)
    shortest = min(len(draft.token_ids) for draft in drafts)
    assert shortest == 6 if max_entropy is None else 1 <= shortest < 6


@pytest.mark.parametrize(("temperature", "s"), [(0.0, 1), (1.0, 1), (1.0, 3)])
def test_drafts_are_the_same_after_preemption(
    loaded: LoadedModel, temperature: float, s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool with blocks for one sequence, and one with blocks for all."""
    monkeypatch.setattr(loaded, "mask_token", VOCABULARY + 5)

    def drafted(blocks: int | None) -> list[list[int]]:
        engine = engine_of(loaded, max_sequences=6, blocks=blocks)
        pool = engine.model_runner.pool
        engine.start()
        openings = [sequence(temperature, prompt=PROMPT * (i + 3), seed=i, tokens_per_pass=s) for i in range(6)]
        drivers = [Driver(engine, opening, parallel=True) for opening in openings]
        drafted: list[list[int]] = [[] for _ in drivers]
        committed: list[list[int]] = [[]] * 6
        for _ in range(3):
            for driver, tokens in zip(drivers, committed, strict=True):
                driver.request(4, tokens)
            for i, driver in enumerate(drivers):
                tokens = driver.result().token_ids
                drafted[i] += tokens
                committed[i] = [*tokens[: i % 4], 11 + i]
        for driver in drivers:
            driver.close()
        Driver(engine, sequence(uses_outcome_cache=False)).propose(1)  # the engine has handled the closes by now
        engine.stop()
        pool.check_integrity()
        assert pool.used_blocks == 1
        return drafted

    assert drafted(blocks=3) == drafted(blocks=None)


def test_nan_logits_end_one_sequence(engine: DraftEngine) -> None:
    bad = Driver(engine, sequence(logit_rules=LogitRules(banned_tokens=tuple(range(VOCABULARY)))))
    good = Driver(engine, sequence())
    bad.request(2)
    good.request(2)
    with pytest.raises(DraftError, match="NaN or infinite") as caught:
        bad.result()
    assert caught.value.reason == "BAD_LOGITS"
    assert len(good.result().token_ids) == 2


@pytest.mark.parametrize("step", ["_begin", "_work_of", "_take"])
def test_an_error_outside_the_pass_ends_one_sequence(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    engine = engine_of(loaded)
    method = getattr(engine, step)

    def fails(part: Any, *more: Any, **how: Any) -> Any:
        if getattr(part, "sequence", part) is bad.sequence:
            raise RuntimeError("a bug")
        return method(part, *more, **how)

    with running(engine):
        bad, good = Driver(engine, sequence()), Driver(engine, sequence())
        monkeypatch.setattr(engine, step, fails)
        bad.request(2)
        good.request(2)
        with pytest.raises(DraftError, match="RuntimeError: a bug"):
            bad.result()
        assert len(good.result().token_ids) == 2
        bad.close()
        good.close()
    assert engine.model_runner.pool.used_blocks == 0


@pytest.mark.parametrize("raises", [False, True], ids=["NaN", "an error"])
def test_sampled_tokens_are_sent_also_if_the_next_pass_fails(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, raises: bool
) -> None:
    """Invariant 4: with q = p, a target's token in place of those that fail would come from them too seldom."""
    failing = {token for token in range(VOCABULARY) if token % 3 == 0 and token not in PROMPT}
    rule = Rule.SIGMOID if raises else Rule.TOKENWISE  # token by token, or in one call
    openings = [replace(sequence(1.0, rule=rule), seed=seed) for seed in range(48)]
    with running(engine_of(loaded, max_sequences=64)) as healthy:
        wanted = [Driver(healthy, opening).propose(4).token_ids for opening in openings]
    engine = engine_of(loaded, max_sequences=64)
    logits, decode, poisoned = engine.model_runner.logits, engine.decode_loop.decode, set[int]()

    def fails(chunks: Sequence[Chunk]) -> torch.Tensor:
        if any(failing & set(chunk.tokens) for chunk in chunks):
            raise RuntimeError("a pass")
        found: torch.Tensor = logits(chunks)
        return found

    def ends(chunks: Sequence[Chunk], *arguments: Any, **options: Any) -> list[list[Sample]]:
        """The decode loop, whose passes over some tokens have NaN logits."""
        drawn: list[list[Sample]] = decode(chunks, *arguments, **options)
        for chunk, own in zip(chunks, drawn, strict=True):
            first = next((i + 1 for i, each in enumerate(own[:-1]) if each.token in failing), None)
            if chunk.slot in poisoned or first is not None:
                own[0 if chunk.slot in poisoned else first :] = [Sample(NO_LOGITS)]
                poisoned.add(chunk.slot)  # keys and values of the token are NaN, too
                engine.model_runner.pool.rollback(chunk.slot, chunk.start + len(chunk.tokens) + len(own) - 1)
        return drawn

    monkeypatch.setattr(engine.model_runner, "logits", fails)
    monkeypatch.setattr(engine.decode_loop, "decode", ends)
    with running(engine):
        for opening, tokens in zip(openings, wanted, strict=True):
            driver = Driver(engine, opening)
            end = next((i + 1 for i, token in enumerate(tokens) if token in failing), 4)
            draft = driver.propose(4)
            assert draft.token_ids == tokens[:end]
            assert (draft.error is None) == (end == 4)
            if end < 4:
                with pytest.raises(DraftError, match="a pass" if raises else "NaN or infinite"):
                    driver.propose(4, [*tokens[:end], 1])
            driver.close()
    cut = sum(bool(failing & set(tokens[:3])) for tokens in wanted)
    assert 10 < cut < 48


# -------------------------------------------------------------------------------------------------------- prefix cache

LONG = [7 * i % VOCABULARY for i in range(70)]  # two full blocks, and some


def drafted(engine: DraftEngine, opening: DraftSequence, *commits: list[int]) -> list[int]:
    driver, tokens = Driver(engine, opening), list[int]()
    for committed in ([], *commits):
        tokens += driver.propose(4, committed).token_ids
    driver.close()
    return tokens


@pytest.mark.parametrize("rules", [PLAIN, LogitRules(presence_penalty=1.0)], ids=["one call", "a token a step"])
def test_a_long_prompt_delays_no_proposal_by_more_than_a_step(
    loaded: LoadedModel, rules: LogitRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps of their own read 64 of its 70 tokens. Each proposal waits for one of them."""
    engine, of_pieces = engine_of(loaded), list[bool]()
    step = engine.step

    def recorded(work: Sequence[DraftWork]) -> None:
        of_pieces.append(not work[0].draws)
        assert {item.draws for item in work} == {work[0].draws}
        step(work)

    monkeypatch.setattr(engine, "step", recorded)
    long, quick = Driver(engine, replace(sequence(), prompt=LONG)), Driver(engine, sequence(logit_rules=rules))
    long.request(4)
    waits, committed = list[int](), list[int]()
    for _ in range(6):
        before = len(of_pieces)
        quick.request(5, committed)
        while not quick.is_done:
            engine.run_once()
        waits.append(sum(of_pieces[before:]))
        committed = [*quick.result().token_ids, 9]
    assert waits == [1] * 4 + [0] * 2
    assert long.is_done


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
def test_a_cached_prefix_changes_no_draft(loaded: LoadedModel, rule: Rule) -> None:
    """Of a prompt, of a prompt that only begins alike, and of one with committed tokens of an earlier sequence."""
    alike = replace(sequence(rule=rule), prompt=[*LONG[:40], 3, 4, 5], cache_salt="")
    first = replace(alike, prompt=LONG)
    later = replace(first, committed=[8] * 6)
    texts = []
    for prefix_cache in (False, True):
        with running(engine_of(loaded, prefix_cache=prefix_cache)) as engine:
            texts.append([drafted(engine, each, [8] * 6, [9]) for each in (first, first, alike, later)])
            hits, queries = engine.prefix_hits, engine.prefix_queries
        assert hits == (2 * 32 * 2 + 32 if prefix_cache else 0)
        assert bool(queries) is prefix_cache
    assert texts[0] == texts[1]


def test_only_equal_salts_share_a_prefix(loaded: LoadedModel) -> None:
    with running(engine_of(loaded)) as engine:
        for salt, found in (("", 0), ("a", 0), ("b", 0), ("a", 64), ("", 64), (None, 0)):
            before = engine.prefix_hits
            drafted(engine, replace(sequence(), prompt=LONG, cache_salt=salt))
            assert engine.prefix_hits - before == found
        assert engine.prefix_queries == 5 * len(LONG)


async def test_the_engine_learns_of_a_sequence_with_its_first_proposal(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each text that the target writes alone would wake the engine's thread."""
    engine, posted = engine_of(loaded), list[type]()
    post = engine.post

    def noted(message: Any) -> None:
        posted.append(type(message))
        post(message)

    monkeypatch.setattr(engine, "post", noted)
    with running(engine):
        silent, drafting = (ModelDrafter(engine).open(sequence()) for _ in range(2))
        silent.advance([1, 2])
        await drafting.propose(2)
        silent.close()
        drafting.close()
    assert posted == [Propose, Close]
    assert engine.model_runner.pool.used_blocks == 0


async def test_a_message_to_an_engine_that_has_ended_holds_no_sequence(loaded: LoadedModel) -> None:
    with running(engine_of(loaded)) as engine:
        drafting = ModelDrafter(engine).open(sequence())
        await drafting.propose(1)
    before = engine._inbox.qsize()
    drafting.close()
    assert engine._inbox.qsize() == before


def test_a_prompt_that_waits_is_looked_up_once(loaded: LoadedModel) -> None:
    """By the metrics: two prompts share steps that read a few tokens each."""
    engine = engine_of(loaded, prefill_tokens=8)
    drivers = [Driver(engine, replace(sequence(), prompt=[first, *LONG], cache_salt="")) for first in (3, 4)]
    for driver in drivers:
        driver.request(2)
    while not all(driver.is_done for driver in drivers):
        engine.run_once()
    assert engine.prefix_queries == 2 * (1 + len(LONG))


def test_a_preempted_sequence_is_looked_up_again(loaded: LoadedModel) -> None:
    """By the metrics: tokens found are never more than those looked up."""
    engine = engine_of(loaded)
    driver, committed = Driver(engine, replace(sequence(), prompt=LONG, cache_salt="")), list[int]()
    for _ in range(3):
        driver.request(2, committed)
        while not driver.is_done:
            engine.run_once()
        committed = [*driver.result().token_ids, 9]
        engine._account()  # as before its next step
        assert driver.sequence.slot is not None
        engine.model_runner.pool.rollback(driver.sequence.slot, 0)
    looked_up = [len(LONG) + 3 * rounds for rounds in range(3)]
    assert (engine.prefix_queries, engine.prefix_hits) == (sum(looked_up), 2 * 64)


@pytest.mark.parametrize(
    "rules",
    [
        LogitRules(logit_bias=((40, 2.0), (VOCABULARY + 5, 9.0))),
        LogitRules(banned_tokens=(VOCABULARY,)),
        LogitRules(stop_token_ids=(7, VOCABULARY + 6), min_new_tokens=9),
    ],
    ids=["bias", "ban", "stop"],
)
def test_rules_may_name_tokens_of_the_target_that_the_draft_lacks(loaded: LoadedModel, rules: LogitRules) -> None:
    with running(engine_of(loaded, vocab_size=VOCABULARY + 7)) as engine:
        driver = Driver(engine, sequence(logit_rules=rules))
        assert len(driver.propose(4).token_ids) == 4
        driver.close()


@pytest.mark.usefixtures("layers_by_torch")  # else the logits are in C alone
def test_a_failed_round_caches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(ModelSource(str(DEMO / "draft"), dtype="float32", device="cpu"))
    opening = replace(sequence(), prompt=LONG, cache_salt="")
    with running(engine_of(model)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.decode_loop, "without_mask", lambda logits: logits[:, :VOCABULARY] * torch.nan)
            driver = Driver(engine, opening)
            with pytest.raises(DraftError, match="NaN or infinite"):
                driver.propose(4)
            driver.close()
        drafted(engine, opening)
        assert engine.prefix_hits == 0


def test_a_prefix_cache_that_fails_fails_no_draft(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("broken")

    opening = replace(sequence(), prompt=LONG, cache_salt="")
    with running(engine_of(loaded)) as engine:
        expected = drafted(engine, opening)
        monkeypatch.setattr(PrefixCache, "adopt", fail)
        monkeypatch.setattr(PrefixCache, "keep", fail)
        assert drafted(engine, opening) == expected
    assert engine.model_runner.pool.used_blocks == 0
