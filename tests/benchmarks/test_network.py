"""What a distance is foretold to cost is what the formulas say."""

from typing import Any

import pytest

from benchmarks.network import ALONE, Foretold
from outrider.theory import tokens_per_second


def runs(**figures: Any) -> list[dict[str, Any]]:
    seconds = ("draft", "wire", "queue", "forward", "verify")
    phases = {name: figures.pop(name, 0.0) for name in seconds}
    return [{"tokens": 300, "drafted": 0, "alpha": None, **figures, "phases": phases}]


def test_what_is_foretold_follows_the_formulas() -> None:
    paired = runs(rounds=100, drafted=400, alpha=0.8, draft=0.4, wire=0.1, queue=0.1, forward=0.6)
    shallow = runs(rounds=100, drafted=100, alpha=0.8, forward=0.55)
    foretold = Foretold.of(paired, runs(rounds=300, forward=1.5), shallow, 4)
    assert (foretold.alpha, foretold.draft_step, foretold.round_trip) == pytest.approx((0.8, 0.001, 0.001))
    assert foretold.verify_pass(5) == pytest.approx(0.005 + 4 * 0.0005)
    assert foretold.rate("sequential", 0.02, 0.0, 96) == pytest.approx(tokens_per_second(0.8, 4, 0.001, 0.007, 0.021))
    assert foretold.rate("outcome cache", 0.0, 1.0, 96) == pytest.approx(tokens_per_second(0.8, 4, 0.0, 0.007, 0.001))
    assert foretold.rate(ALONE, 0.048, 0.0, 96) == pytest.approx(1 / 0.0055)
    assert foretold.rate("adaptive", 0.0, 0.0, 96) >= foretold.rate("sequential", 0.0, 0.0, 96)
