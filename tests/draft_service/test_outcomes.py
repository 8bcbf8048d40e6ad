"""Which verdicts are likely: chances that are chances, risky places first, and a temperature that verdicts teach."""

import math
import random

import numpy as np
import pytest

from draft_service.drafters.outcomes import TEMPERATURES, Forecast, Place

SURE = Place([7, 1, 2], [9.0, 1.0, 0.0])
RISKY = Place([8, 3, 4], [5.0, 4.9, 1.0])


@pytest.mark.parametrize("by_scores", [True, False])
def test_chances_of_all_outcomes_sum_to_one(by_scores: bool) -> None:
    forecast = Forecast(by_scores=by_scores)
    guesses, all_stand = forecast.guesses([SURE, RISKY, SURE], [7, 8, 7])
    behind = forecast.after_all(RISKY, 3, all_stand)
    assert sum(guess.chance for guess in behind) == pytest.approx(all_stand)
    assert sum(guess.chance for guess in guesses) + all_stand == pytest.approx(1.0)
    assert min(guess.chance for guess in guesses + behind) > 0


def test_the_place_where_two_tokens_are_near_is_where_it_is_expected_to_end() -> None:
    guesses, _ = Forecast(by_scores=True).guesses([SURE, RISKY, SURE], [7, 8, 7])
    best = max(guesses, key=lambda guess: guess.chance)
    assert (best.accepted, best.token) == (1, 3)


def test_no_outcome_puts_the_rejected_token_in_its_own_place_nor_one_without_chance() -> None:
    place = Place([8, 3, 4], [5.0, 4.9, -math.inf])
    guesses, all_stand = Forecast(by_scores=True).guesses([place], [8])
    assert [guess.token for guess in guesses] == [3]
    assert {guess.token for guess in Forecast(by_scores=True).after_all(place, 1, all_stand)} == {8, 3}


def test_where_tokens_are_drawn_each_place_has_the_mean_acceptance_rate() -> None:
    forecast = Forecast(by_scores=False)
    for _ in range(300):
        forecast.learn([SURE] * 4, [7] * 4, 1, 5)
    assert forecast.acceptance_rate == pytest.approx(0.5, abs=0.02)
    guesses, all_stand = forecast.guesses([SURE, RISKY], [7, 8])
    assert all_stand == pytest.approx(0.25, abs=0.02)
    assert sum(guess.chance for guess in guesses if guess.accepted == 0) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("noise", [0.15, 0.45, 1.5])
def test_the_temperature_is_learned_from_verdicts(noise: float) -> None:
    """A target whose scores are the draft's with Gumbel noise of a scale chooses by softmax(scores / scale)."""
    forecast, random_ = Forecast(by_scores=True), np.random.default_rng(2)
    stood = expected = 0.0
    for round_ in range(600):
        scores = np.sort(random_.normal(size=(4, 5)) * 1.5, axis=1)[:, ::-1]
        places = [Place([0, 1, 2, 3, 4], row.tolist()) for row in scores]
        chosen = (scores + noise * random_.gumbel(size=scores.shape)).argmax(axis=1)
        accepted = next((i for i, token in enumerate(chosen) if token), 4)
        if round_ >= 200:
            expected += forecast.stands(places[0])
            stood += accepted > 0
        forecast.learn(places, [0] * 4, accepted, int(chosen[accepted]) if accepted < 4 else 1)
    assert abs(np.log(forecast.temperature / noise)) <= np.log(1.6)
    assert forecast.temperature in TEMPERATURES
    assert stood == pytest.approx(expected, rel=0.12)


def test_a_verdict_that_ends_the_text_teaches_what_it_says_and_no_more() -> None:
    forecast = Forecast(by_scores=True)
    for _ in range(random.Random(1).randrange(3, 9)):
        forecast.learn([SURE, RISKY], [7, 8], 1, None)  # cut behind its first token
    guesses, all_stand = forecast.guesses([SURE], [7])
    assert 0 < all_stand <= 1
    assert guesses
