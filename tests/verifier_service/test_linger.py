"""A pass is held back for those about to answer, within what it may save, and never where nobody else is expected.

The engine is real and runs the demo draft; its passes are driven by hand, so that no test waits.
"""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import ModelRunner
from outrider.service.cost_model import FittedCost
from outrider.service.sampling import Sampling
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2
from verifier_service.engine import HalfClose, Open, Submit, VerifierEngine
from verifier_service.request import Opening, Round
from verifier_service.sequence import TargetSequence, Turnaround, seconds_to_linger

MODEL = Path(__file__).parents[2] / "models" / "demo" / "draft"
VOCABULARY = 2000
TURNAROUND = 50.0  # seconds: so long that what the test itself takes is nothing


@pytest.mark.parametrize(
    ("due", "bound", "expected"),
    [
        ([], 2.0, 0.0),
        ([10.5], 2.0, 0.5),
        ([10.5, 11.0], 2.0, 1.0),
        ([10.5, 11.5], 2.0, 0.5),  # the second is beyond what pays, counted from 9
        ([9.5], 2.0, 0.0),  # late: nobody waits for it
        ([10.5], 1.0, 0.0),
        ([10.5], 0.0, 0.0),
    ],
)
def test_the_last_that_pays_is_waited_for(due: list[float], bound: float, expected: float) -> None:
    assert seconds_to_linger(10.0, 9.0, due, bound) == expected


def test_a_turnaround_is_its_mean_and_a_margin() -> None:
    turnaround = Turnaround()
    assert turnaround.latest() is None
    for _ in range(60):
        turnaround.add(0.002)
    assert turnaround.latest() == pytest.approx(0.002, rel=0.01)
    for step in range(400):
        turnaround.add(0.002 if step % 2 else 0.004)
    assert turnaround.latest() == pytest.approx(0.005, rel=0.1)  # mean 3 ms, mean deviation 1 ms


ANY = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1.0, 10.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(turnarounds=st.lists(ANY, max_size=8), now=ANY, since=ANY, due=st.lists(ANY, max_size=4), bound=st.floats(0, 10))
def test_whatever_clocks_do_a_step_is_not_held_back_for_longer_than_the_bound(
    turnarounds: list[float], now: float, since: float, due: list[float], bound: float
) -> None:
    turnaround = Turnaround()
    for seconds in turnarounds:
        turnaround.add(seconds)
    latest = turnaround.latest()
    assert (latest is None) == (turnaround.count == 0)
    assert latest is None or math.isfinite(latest)
    assert 0.0 <= seconds_to_linger(now, since, due, bound) <= bound


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(MODEL), dtype="float32", device="cpu"))


class Verifier:
    """An engine, and sequences that have answered after `TURNAROUND` once."""

    def __init__(self, loaded: LoadedModel, *, max_linger: float = 1000.0, fixed: float = 1000.0) -> None:
        limits = model_pb2.Limits(max_gamma=4, max_sequences=4, max_sequence_tokens=64)
        self.engine = VerifierEngine(
            ModelRunner.build(loaded, max_sequences=4, max_length=64),
            model_pb2.ModelInfo(vocab_size=VOCABULARY, limits=limits),
            pass_tokens=64,
            max_linger=max_linger,
            verify_path="torch",
        )
        self.engine.prepare()
        self.engine.cost = FittedCost([(1, fixed)])

    def open(self, *, has_answered: bool = True) -> TargetSequence:
        sampling = Sampling(law=SamplingParams(), logit_rules=LogitRules(), rule=Rule.COUPLED, lenience=1.0, seed=1)
        opening = Opening(
            request_id="r",
            cache_salt="",
            prompt=[11, 12],
            committed=[],
            sampling=sampling,
            seed=1,
            logit_rules=LogitRules(),
            stop_token_ids=frozenset(),
            max_new_tokens=32,
            top_logprobs=-1,
        )
        sequence = TargetSequence("s", opening, VOCABULARY, lambda reply: None)
        self.engine.receive(Open(sequence))
        self.submit(sequence)
        self.run()
        if has_answered:
            self.submit(sequence, after=TURNAROUND)
            self.run()
        return sequence

    def submit(self, sequence: TargetSequence, *, after: float | None = None) -> None:
        round_ = Round(
            number=sequence.last_round + 1,
            base_length=len(sequence.tokens),
            prefix_hash=PrefixHash(sequence.tokens).digest(),
            seen_round=sequence.last_round,
            tokens=(7,),
            arrived=time.perf_counter() if after is None else sequence.judged_at + after,
        )
        self.engine.receive(Submit(sequence, round_))

    def run(self) -> None:
        """One pass, without lingering."""
        work = self.engine.schedule()
        self.engine.process(work, self.engine.forward(work))


def test_one_sequence_is_never_held_back(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    alone = verifier.open()
    for _ in range(3):
        assert verifier.engine.linger() == 0
        verifier.submit(alone)
        assert verifier.engine.linger() == 0
        verifier.run()


def test_a_pass_waits_for_who_is_about_to_answer_and_no_longer(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    first, second = verifier.open(), verifier.open()
    assert verifier.engine.linger() == 0  # nothing to hold back
    verifier.submit(first)
    assert 0 < verifier.engine.linger() <= 2 * TURNAROUND
    verifier.submit(second)
    assert verifier.engine.linger() == 0


@pytest.mark.parametrize("switched_off", [{"max_linger": 0.0}, {"max_linger": 1.0}, {"fixed": 1.0}])
def test_a_pass_waits_within_its_bound_and_its_own_fixed_cost(
    loaded: LoadedModel, switched_off: dict[str, float]
) -> None:
    verifier = Verifier(loaded, **switched_off)
    first, _ = verifier.open(), verifier.open()
    verifier.submit(first)
    assert verifier.engine.linger() == 0


def test_nobody_waits_for_the_unknown_or_for_who_has_ended(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    first, second = verifier.open(), verifier.open()
    verifier.open(has_answered=False)
    verifier.submit(first)
    assert verifier.engine.linger() > 0
    verifier.engine.receive(HalfClose(second))
    assert verifier.engine.linger() == 0
