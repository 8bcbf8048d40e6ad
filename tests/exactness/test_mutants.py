"""Would these tests notice? Real services with one deliberate fault each must be refuted, and without it must not.

The target is the Markov one, so that every token of 64 texts is a sample; the draft is a good one, only too sure of
itself, since a fault bends the distribution most where acceptance and rejection both have much to say. Sizes are the
smallest that refute at `REFUTED`, with room to spare. Two faults are in every run, the others are slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Service
from tests.exactness.distributions import Filters
from tests.exactness.worlds import FILTERS, World, sampled_fits

REFUTED = 1e-9
SOUND = 1e-3
NARROW = Filters(temperature=1.0, top_k=6, top_p=0.8)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def _p_value(service: Service, markov: World, filters: Filters, length: int) -> float:
    _, *fits = sampled_fits(service, markov.target, (14,), filters=filters, length=length, gamma=2, seed=5)
    return min(fit.p_value for fit in fits)


@pytest.mark.parametrize(
    ("fault", "service", "filters", "length"),
    [
        ("untruncated_q", "draft_service", NARROW, 48),
        ("negative_residual", "verifier_service", NARROW, 48),
        slow("repeated_noise", "verifier_service", NARROW, 32),
        slow("shared_noise", "draft_service", FILTERS, 96),
        slow("shared_resampling", "verifier_service", NARROW, 48),
    ],
)
def test_a_fault_is_noticed(
    fault: str, service: str, filters: Filters, length: int, markov: World, sharpened: Path
) -> None:
    with markov.with_fault(sharpened, service, fault) as front:
        assert _p_value(front, markov, filters, length) < REFUTED


@pytest.mark.parametrize(("filters", "length"), [(NARROW, 48), slow(FILTERS, 96)])
def test_the_same_pair_without_fault_is_not(filters: Filters, length: int, sound: Service, markov: World) -> None:
    assert _p_value(sound, markov, filters, length) > SOUND
