"""Staged drafting: what goes out is what the draft model alone would have proposed, whoever guesses for it.

Under `coupled` and at temperature 0 that is the same tokens. Under the other rules it is the same law, of all tokens of
a proposal together: enumerated from the model's own q̂, which is cut to four tokens so that three of them can be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service.drafters import base, staged
from draft_service.drafters.base import Draft, DraftSequence, Guesser, GuessingDrafter
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.lookup import Copier, LookupDrafter
from draft_service.drafters.ngram import NGramDrafter
from draft_service.drafters.sequence import GuessingState
from draft_service.drafters.staged import StagedCounts
from kernels.adjustments import LogitRules
from kernels.dense import DraftLogits
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.draft_service import engines
from tests.draft_service.engines import CONFIG, VOCABULARY, engine_of, running
from tests.exactness import chisquare, pairs

TEXT = [5, 17, 300, 42, 7, 7, 1999, 5, 17, 300, 42, 8, 9, 5, 17, 300]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = pairs.write_target(tmp_path_factory.mktemp("tiny") / "model", seed=1, sharpness=0.8)
    return load_model(ModelSource(str(folder), dtype="float32", device="cpu"))


def counts_of(engine: DraftEngine) -> StagedCounts:
    assert engine.staging is not None
    return engine.staging.counts


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    with running(staged_engine(loaded)) as engine:
        yield engine


def staged_engine(loaded: LoadedModel, **how: Any) -> DraftEngine:
    return engine_of(loaded, **{"guesses": 8, "max_length": 160, **how})


class Driver(engines.Driver):
    def begin_anew(self, told: DraftSequence, cheap: GuessingDrafter) -> None:
        """As if another sequence of the same prompt, its prompt read. Between rounds nobody else looks at it."""
        self.sequence.told = told
        self.sequence.guessing = GuessingState(cheap.guesser(told, Domain.STAGED_DRAFT))


def sequence(**changes: Any) -> DraftSequence:
    return engines.sequence(**{"prompt": TEXT, **changes})


def ngram(corpus: Sequence[int] = TEXT, size: int = VOCABULARY, sparse: SparseConfig = CONFIG) -> NGramDrafter:
    return NGramDrafter([corpus], vocab_size=size, sparse=sparse, order=3, entries=10_000)


CHEAP = {"lookup": LookupDrafter(min_match=1), "ngram": ngram()}
GREEDY = SamplingParams(temperature=0.0)


# --------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("cheap", CHEAP)
@pytest.mark.parametrize(
    "told",
    [
        sequence(law=GREEDY),
        sequence(rule=Rule.COUPLED),
        sequence(rule=Rule.COUPLED, draft_temperature=0.3),
        sequence(draft_temperature=0.0),
        sequence(law=GREEDY, logit_rules=LogitRules(presence_penalty=1.0)),
        sequence(rule=Rule.COUPLED, logit_rules=LogitRules(frequency_penalty=0.5, banned_tokens=(17, 300))),
    ],
    ids=["greedy", "coupled", "coupled, colder", "greedy draft", "penalties", "penalties and bans, coupled"],
)
def test_tokens_are_the_models_own_over_many_rounds(cheap: str, told: DraftSequence, engine: DraftEngine) -> None:
    """Verdicts that accept all, some and none of a proposal, and one of what nobody drafted."""
    staged, alone = Driver(engine, told, CHEAP[cheap]), Driver(engine, told)
    committed = list[int]()
    for accepted in (6, 0, 2, 6, 1, 6, 6, 4):
        drafts = [driver.propose(6, committed) for driver in (staged, alone)]
        assert drafts[0].token_ids == drafts[1].token_ids
        assert drafts[0].laws == drafts[1].laws
        committed = [*drafts[0].token_ids[:accepted], 11 + accepted, 5, 17]
    assert counts_of(engine).passes > 0
    assert counts_of(engine).failures == 0


def test_one_pass_gives_several_tokens_where_the_guesses_are_good(engine: DraftEngine) -> None:
    """At temperature 0 the model repeats itself before long, and then every guess stands."""
    driver, committed = Driver(engine, sequence(law=GREEDY), CHEAP["lookup"]), list[int]()
    for _ in range(16):
        committed = driver.propose(6, committed).token_ids
    counts = counts_of(engine)
    print(counts)
    assert 0 < counts.accepted <= counts.guessed <= 5 * counts.passes
    assert counts.accepted > counts.passes


@pytest.mark.parametrize("cheap", CHEAP)
def test_neighbours_change_nothing(cheap: str, engine: DraftEngine) -> None:
    """Staged and plain sequences, of different rules, in the same passes and alone."""
    kinds = [
        (sequence(seed=1), True),
        (sequence(seed=2, rule=Rule.COUPLED, prompt=TEXT[2:]), True),
        (sequence(seed=3), False),
        (sequence(seed=4, law=GREEDY, prompt=TEXT[1:]), True),
    ]

    def drivers() -> list[Driver]:
        return [Driver(engine, told, CHEAP[cheap] if is_staged else None) for told, is_staged in kinds]

    alone = []
    for driver in drivers():
        alone.append(driver.propose(6).token_ids)
        driver.close()
    together = drivers()
    for driver in together:
        driver.ask(6)
    assert [driver.answer().token_ids for driver in together] == alone


def test_a_long_prompt_is_read_in_pieces_and_guessed_from_as_a_whole(
    engine: DraftEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, honest = list[int](), Copier.read

    def noted(self: Copier, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        honest(self, tokens)

    monkeypatch.setattr(Copier, "read", noted)
    told = sequence(prompt=TEXT * 5, law=GREEDY)
    drafted = Driver(engine, told, LookupDrafter(min_match=2)).propose(6).token_ids
    assert drafted == Driver(engine, told).propose(6).token_ids
    assert max(read) <= 17
    assert sum(read) == len(told.prompt)
    assert counts_of(engine).guessed > 0


@pytest.mark.parametrize("broken", ["read", "guess"])
def test_a_guesser_that_breaks_is_left_out(broken: str, engine: DraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are guessed for still."""

    class Broken(Copier):
        pass

    monkeypatch.setattr(Broken, broken, lambda *arguments: 1 / 0)

    class BrokenDrafter(LookupDrafter):
        def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
            return Broken(1)

    told = sequence(law=GREEDY)
    drivers = [Driver(engine, told, cheap) for cheap in (BrokenDrafter(min_match=1), CHEAP["lookup"], None)]
    for committed in ([], [1, 2]):
        for driver in drivers:
            driver.ask(6, committed)
        hurt, guessed, alone = (driver.answer().token_ids for driver in drivers)
        assert hurt == guessed == alone
    assert counts_of(engine).failures == 1
    assert counts_of(engine).passes > 0


def test_under_sigmoid_the_logits_are_told(engine: DraftEngine) -> None:
    told = sequence(rule=Rule.SIGMOID, law=SamplingParams(temperature=0.4))
    draft = Driver(engine, told, CHEAP["ngram"]).propose(6)
    assert counts_of(engine).passes > 0
    for token, logits in zip(draft.token_ids, draft.laws, strict=True):
        assert isinstance(logits, DraftLogits)
        assert np.isfinite(float(logits.values[token]))


# ------------------------------------------------------------------------------------------------------ the same law

CUT = SparseConfig(keep_mass=1.0, max_support=4)
SIZE = pairs.VOCABULARY
PROMPT = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 6, 1, 2]
GAMMA = 3
LEVEL = 0.01
REFUTED = 1e-9


class Model:
    """q̂ of the tiny model after any prefix."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._packed = ModelRunner.build(loaded, max_sequences=1, max_length=64)

    def law(self, tokens: Sequence[int]) -> SparseDistribution:
        slot = self._packed.pool.allocate()
        logits = self._packed.forward([Chunk(slot, list(tokens), 0, len(tokens) - 1)])
        self._packed.pool.free(slot)
        (law,) = sparsify(probabilities(logits, SamplingParams()), CUT)
        return law

    def joint(self) -> np.ndarray:
        """The law of three tokens after the prompt, `[V, V, V]`."""
        joint = np.zeros((SIZE,) * GAMMA)
        for first in self.law(PROMPT).ids.tolist():
            for second in self.law([*PROMPT, first]).ids.tolist():
                after = [self.law(PROMPT), self.law([*PROMPT, first]), self.law([*PROMPT, first, second])]
                for third in after[2].ids.tolist():
                    chances = zip(after, (first, second, third), strict=True)
                    joint[first, second, third] = np.prod([law.probability(token) for law, token in chances])
        return joint


def proposals(
    loaded: LoadedModel, cheap: GuessingDrafter, *, count: int, size: int = SIZE
) -> tuple[np.ndarray, DraftEngine, list[Draft]]:
    """Counts `[V, V, V]` of so many proposals after the prompt, each with a seed of its own."""
    engine = staged_engine(loaded, vocab_size=size, config=CUT, guesses=2, max_length=64)
    engine.start()
    told = DraftSequence(PROMPT, [], SamplingParams(), LogitRules(), 0)
    drivers = [Driver(engine, told, cheap, vocab_size=size) for _ in range(4)]
    counts, drafts = np.zeros((SIZE,) * GAMMA, dtype=np.int64), list[Draft]()
    for first in range(0, count, len(drivers)):
        for number, driver in enumerate(drivers):
            driver.begin_anew(replace(told, seed=7_000_003 + first + number), cheap)
            driver.ask(GAMMA)
        for driver in drivers:
            drafts.append(driver.answer())
            counts[tuple(drafts[-1].token_ids)] += 1
    engine.stop()
    return counts, engine, drafts


def cheap_for_tiny(kind: str) -> tuple[GuessingDrafter, int]:
    """A guesser and the target's size; `foreign` also guesses tokens that the draft lacks."""
    if kind == "lookup":
        return LookupDrafter(min_match=2), SIZE
    size = SIZE + 6 if kind == "foreign" else SIZE
    corpus = np.random.default_rng(5).integers(0, size, 400).tolist()
    return ngram([*corpus, *PROMPT], size, SparseConfig(keep_mass=1.0, max_support=12)), size


@pytest.mark.parametrize(
    ("count", "distance"), [(1600, 0.1), pytest.param(4200, 0.06, marks=pytest.mark.slow)], ids=["1,600", "4,200"]
)
@pytest.mark.parametrize("kind", ["lookup", "foreign"])
def test_the_joint_law_of_a_proposal_is_the_drafts(kind: str, count: int, distance: float, tiny: LoadedModel) -> None:
    """1,600 proposals over 64 outcomes: a total variation of 0.1 is noticed at a level of 1 % with a power of 95 %.
    With the 4,200 of `-m slow` it is one of 0.06.
    """
    cheap, size = cheap_for_tiny(kind)
    counts, engine, _ = proposals(tiny, cheap, count=count, size=size)
    fit = chisquare.goodness_of_fit(counts.ravel(), Model(tiny).joint().ravel())
    print(fit, counts_of(engine))
    assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=0.95) <= distance
    assert 0.05 * counts_of(engine).guessed < counts_of(engine).accepted < 0.9 * counts_of(engine).guessed
    assert fit.p_value > LEVEL


def test_what_is_told_is_the_law_after_each_prefix(tiny: LoadedModel) -> None:
    """Up to a unit of the last place, which the width of a pass may move."""
    cheap, size = cheap_for_tiny("ngram")
    _, _, drafts = proposals(tiny, cheap, count=40, size=size)
    model = Model(tiny)
    for draft in drafts:
        for place, law in enumerate(draft.laws):
            own = model.law([*PROMPT, *draft.token_ids[:place]])
            assert isinstance(law, SparseDistribution)
            assert law.ids.tolist() == own.ids.tolist()
            assert np.abs(law.weights.astype(int) - own.weights.astype(int)).max() <= 1
            assert law.probability(draft.token_ids[place]) > 0


def _accepts_all_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test at all: a guess stands wherever the draft could have said it."""
    monkeypatch.setattr(staged, "accepts", lambda u, guessed, law, token: law.probability(token) > 0)


def _whole_law_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was rejected is drawn from q̂, and not from what is left of it."""
    monkeypatch.setattr(staged, "resample", lambda u, guessed, law, token: law.token_at(u))


def _tests_by_the_guesses_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess is judged by the number that it was drawn by."""

    def shared(seed: int, base: int, place: int, domain: Domain, draw: int) -> float:
        return uniform(seed, base, place, Domain.STAGED_DRAFT if domain is Domain.STAGED_ACCEPT else domain, draw)

    monkeypatch.setattr(staged, "uniform", shared)


def _draws_without_the_inner_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every inner round of a proposal has the same draws."""
    monkeypatch.setattr(
        staged, "uniform", lambda seed, base, place, domain, draw: uniform(seed, base, place, domain, 0)
    )


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (_accepts_all_that_may_be, "lookup"),
        (_whole_law_after_a_rejection, "ngram"),
        pytest.param(_tests_by_the_guesses_draws, "ngram", marks=pytest.mark.slow),
        pytest.param(_draws_without_the_inner_base, "ngram", marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_noticed(fault: Any, kind: str, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    cheap, size = cheap_for_tiny(kind)
    counts, _, _ = proposals(tiny, cheap, count=600, size=size)
    fit = chisquare.goodness_of_fit(counts.ravel(), Model(tiny).joint().ravel())
    print(fit)
    assert fit.p_value < REFUTED


def test_no_draw_is_used_twice_nor_for_anything_else(engine: DraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 2: over rounds and inner rounds, by guesser, test and residual alike, every counter is new."""
    made = list[tuple[int, int, Domain, int]]()

    def recorded(seed: int, base: int, place: int, domain: Domain, draw: int = 0) -> float:
        made.append((base, place, domain, draw))
        return uniform(seed, base, place, domain, draw)

    monkeypatch.setattr(staged, "uniform", recorded)
    monkeypatch.setattr(base, "uniform", recorded)
    driver, committed = Driver(engine, sequence(), CHEAP["ngram"]), list[int]()
    for accepted in (0, 6, 2, 6, 1, 0):
        committed = [*driver.propose(6, committed).token_ids[:accepted], 11]
    assert len(set(made)) == len(made) > 50
    staged_domains = {Domain.STAGED_DRAFT, Domain.STAGED_ACCEPT, Domain.STAGED_RESAMPLE}
    assert {domain for _, _, domain, _ in made} == {Domain.DRAFT, *staged_domains}
    assert max(draw for _, _, _, draw in made) > 0
