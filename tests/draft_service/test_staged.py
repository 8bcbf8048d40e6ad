"""Staged drafting: proposals have the distribution of the draft model alone, with any guesser.

Under `coupled` and at temperature 0 these are the same tokens. Under other rules it is the same joint distribution of
a proposal, enumerated from the model's own q̂. q̂ is cut to four tokens, so that three of them can be enumerated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service.drafters import base, staged
from draft_service.drafters.base import CheapDrafter, DraftSequence, Guesser, Guesses
from draft_service.drafters.cheap import Copier, LookupDrafter
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.ngram import NGramDrafter
from draft_service.drafters.sequence import DraftWork, GuessingState, ModelSequence
from draft_service.drafters.staged import Staging, accepts, resample
from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution
from kernels.verify import Rule
from outrider.evaluation import chisquare
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk
from outrider.runtime.torch_runner import TorchRunner
from tests.draft_service import engines
from tests.draft_service.engines import CONFIG, VOCABULARY, engine_of, running
from tests.exactness import pairs
from tests.kernels import reference
from tests.kernels.cases import sparsify

TEXT = [5, 17, 300, 42, 7, 7, 1999, 5, 17, 300, 42, 8, 9, 5, 17, 300]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = pairs.write_target(tmp_path_factory.mktemp("tiny") / "model", seed=1, sharpness=0.8)
    return load_model(ModelSource(str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    with running(staged_engine(loaded)) as engine:
        yield engine


def staged_engine(loaded: LoadedModel, **how: Any) -> DraftEngine:
    return engine_of(loaded, **{"guesses": 8, "max_length": 160, **how})


class Driver(engines.Driver):
    def restart(self, opening: DraftSequence, cheap: CheapDrafter) -> None:
        """Become another sequence of the same prompt, already prefilled. The engine is idle between rounds."""
        self.sequence.opening = opening
        self.sequence.guessing = GuessingState(cheap.guesser(opening, Domain.STAGED_DRAFT))


def sequence(**changes: Any) -> DraftSequence:
    return engines.sequence(**{"prompt": TEXT, **changes})


def ngram(corpus: Sequence[int] = TEXT, size: int = VOCABULARY, sparse: SparseConfig = CONFIG) -> NGramDrafter:
    return NGramDrafter([corpus], vocab_size=size, sparse=sparse, order=3, entries=10_000)


CHEAP = {"lookup": LookupDrafter(min_match=1), "ngram": ngram()}
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("cheap", CHEAP)
@pytest.mark.parametrize(
    "opening",
    [
        sequence(params=GREEDY),
        sequence(rule=Rule.COUPLED, draft_temperature=0.3),
        sequence(draft_temperature=0.0),
        sequence(rule=Rule.COUPLED, logit_rules=LogitRules(frequency_penalty=0.5, banned_tokens=(17, 300))),
    ],
    ids=["greedy", "coupled, colder", "greedy draft", "penalties and bans, coupled"],
)
def test_tokens_are_those_of_the_model_alone_over_many_rounds(
    cheap: str, opening: DraftSequence, engine: DraftEngine
) -> None:
    """Verdicts accept all, some and none of a proposal, and add other tokens."""
    staged, alone = Driver(engine, opening, CHEAP[cheap]), Driver(engine, opening)
    committed = list[int]()
    for accepted in (6, 0, 2, 6, 1, 6, 6, 4):
        drafts = [driver.propose(6, committed) for driver in (staged, alone)]
        assert drafts[0].token_ids == drafts[1].token_ids
        assert drafts[0].distributions == drafts[1].distributions
        committed = [*drafts[0].token_ids[:accepted], 11 + accepted, 5, 17]
    assert engine.staging.steps > 0
    assert engine.staging.failures == 0


def test_a_guess_that_the_draft_lacks_stays_in_the_round() -> None:
    """Invariant 4: its q̂ has judged it. Only what runs in the draft model ends before it."""
    q = SparseDistribution(np.arange(0, 20), np.ones(20, np.uint16), 20)

    class Fixed(Guesser):
        def read(self, tokens: Sequence[int]) -> None:
            """Reads nothing."""

        def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
            return [(token, q) for token in (3, 12, 4)]

    own = ModelSequence.begin(sequence(prompt=[1, 2, 3]), 20)
    own.gamma, own.guessing = 6, GuessingState(Fixed())
    longer = Staging(3, 10).with_guesses(DraftWork(own, Chunk(0, [3], 2, 0), draws=True))
    assert [token for token, _ in longer.guesses] == [3, 12]
    assert list(longer.chunk.tokens) == [3, 3]


def test_a_broken_guesser_affects_its_own_sequence_only(engine: DraftEngine) -> None:
    class Broken(Copier):
        def guess(self, *arguments: Any) -> Any:
            raise ZeroDivisionError

    class BrokenDrafter(LookupDrafter):
        def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
            return Broken(1)

    opening = sequence(params=GREEDY)
    drivers = [Driver(engine, opening, cheap) for cheap in (BrokenDrafter(min_match=1), CHEAP["lookup"], None)]
    for committed in ([], [1, 2]):
        for driver in drivers:
            driver.request(6, committed)
        broken, guessed, alone = (driver.result().token_ids for driver in drivers)
        assert broken == guessed == alone
    assert engine.staging.failures == 1
    assert engine.staging.steps > 0


CUT = SparseConfig(keep_mass=1.0, max_support=4)
SIZE = pairs.VOCABULARY
PROMPT = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 6, 1, 2]
GAMMA = 3


def joint_distribution(loaded: LoadedModel) -> np.ndarray:
    """The distribution of three tokens after the prompt by the model's own q̂, `[V, V, V]`."""
    model = TorchRunner.build(loaded, max_sequences=1, max_length=64)

    def after(*tokens: int) -> SparseDistribution:
        slot = model.pool.allocate()
        prefix = [*PROMPT, *tokens]
        logits = model.forward([Chunk(slot, prefix, 0, len(prefix) - 1)])
        model.pool.free(slot)
        (q,) = sparsify(probabilities(logits, SamplingParams()), CUT)
        return q

    joint, start = np.zeros((SIZE,) * GAMMA), after()
    for first in start.ids.tolist():
        second_q = after(first)
        for second in second_q.ids.tolist():
            third_q = after(first, second)
            for third in third_q.ids.tolist():
                chances = start.probability(first), second_q.probability(second), third_q.probability(third)
                joint[first, second, third] = np.prod(chances)
    return joint


@pytest.mark.parametrize("guesser", ["lookup", "ngram"])
def test_the_joint_distribution_of_a_proposal_is_the_drafts(guesser: str, tiny: LoadedModel) -> None:
    """1,600 proposals over 64 outcomes: a total variation of 0.1 is noticed at a level of 1 % with a power of 95 %.

    `ngram` also guesses tokens that the draft lacks.
    """
    size = SIZE + 6
    corpus = np.random.default_rng(5).integers(0, size, 400).tolist()
    by_counts = ngram([*corpus, *PROMPT], size, SparseConfig(keep_mass=1.0, max_support=12))
    cheap: CheapDrafter = by_counts if guesser == "ngram" else LookupDrafter(min_match=2)
    engine = staged_engine(tiny, vocab_size=size, config=CUT, guesses=2, max_length=64)
    engine.start()
    opening = DraftSequence(PROMPT, [], SamplingParams(), LogitRules(), 0)
    drivers = [Driver(engine, opening, cheap) for _ in range(4)]
    outcomes = np.zeros((SIZE,) * GAMMA, dtype=np.int64)
    for first in range(0, 1600, len(drivers)):
        for number, driver in enumerate(drivers):
            driver.restart(replace(opening, seed=7_000_003 + first + number), cheap)
            driver.request(GAMMA)
        for driver in drivers:
            outcomes[tuple(driver.result().token_ids)] += 1
    engine.stop()
    fit, staging = chisquare.goodness_of_fit(outcomes.ravel(), joint_distribution(tiny).ravel()), engine.staging
    assert chisquare.detectable(fit.df, fit.n, level=0.01, power=0.95) <= 0.1
    assert 0.05 * staging.guessed < staging.accepted < 0.9 * staging.guessed
    assert fit.p_value > 0.01


def test_no_draw_is_used_twice(engine: DraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 2: over rounds and inner rounds, guesser, test and residual each use new counters."""
    made = list[tuple[int, int, Domain, int]]()

    def recorded(seed: int, base: int, index: int, domain: Domain, draw: int = 0) -> float:
        made.append((base, index, domain, draw))
        return uniform(seed, base, index, domain, draw)

    monkeypatch.setattr(staged, "uniform", recorded)
    monkeypatch.setattr(base, "uniform", recorded)
    driver, committed = Driver(engine, sequence(), CHEAP["ngram"]), list[int]()
    for accepted in (0, 6, 2, 6, 1, 0):
        committed = [*driver.propose(6, committed).token_ids[:accepted], 11]
    assert len(set(made)) == len(made) > 50
    staged_domains = {Domain.STAGED_DRAFT, Domain.STAGED_ACCEPT, Domain.STAGED_RESAMPLE}
    assert {domain for _, _, domain, _ in made} == {Domain.DRAFT, *staged_domains}
    assert max(draw for _, _, _, draw in made) > 0


# ------------------------------------------------------------------- the acceptance rule between two drafts

KINDS = 12


def q_of(weights: dict[int, int]) -> SparseDistribution:
    ids = np.array(sorted(weights))
    return SparseDistribution(ids, np.array([weights[token] for token in ids], np.uint16), sum(weights.values()))


def random_q(generator: np.random.Generator) -> SparseDistribution:
    ids = generator.choice(KINDS, int(generator.integers(1, 7)), replace=False)
    return q_of({int(token): int(generator.integers(1, 65536)) for token in ids})


def dense(sparse: SparseDistribution) -> np.ndarray:
    p = np.zeros(KINDS)
    p[sparse.ids] = sparse.weights / sparse.total
    return p


@pytest.mark.parametrize("is_point_mass", [False, True])
def test_acceptance_is_algorithm_1_with_quantised_q_as_the_target(is_point_mass: bool) -> None:
    generator = np.random.default_rng(1)
    kept = 0
    for _ in range(3000):
        guessed, q_hat = (None if is_point_mass else random_q(generator)), random_q(generator)
        token = int(generator.integers(KINDS)) if guessed is None else int(generator.choice(guessed.ids))
        q, r = dense(q_hat), np.eye(KINDS)[token] if guessed is None else dense(guessed)
        u, w = generator.random(2)
        is_accepted = reference.accepts(u, 1.0, r[token], q[token])
        assert accepts(u, guessed, q_hat, token) == is_accepted
        kept += is_accepted
        if not is_accepted:
            cdf = reference.residual(q, r).cumsum()
            assert resample(w, guessed, q_hat, token) == np.searchsorted(cdf, w * cdf[-1], side="right")
    assert 200 < kept < 2800


def test_a_token_without_mass_is_rejected_and_the_test_is_strict() -> None:
    q_hat = q_of({1: 1, 2: 3})
    assert not accepts(0.0, None, q_hat, 0)
    assert not accepts(0.0, q_of({0: 1}), q_hat, 0)
    assert accepts(0.0, q_of({1: 1}), q_hat, 1)
    assert not accepts(0.25, None, q_hat, 1), "u = q̂ exactly"
    assert accepts(np.nextafter(0.25, 0), None, q_hat, 1)
    assert not accepts(0.0, q_of({2: 1}), q_hat, 1), "a guess with r = 0"
    assert resample(0.999, None, q_hat, 2) == 1
