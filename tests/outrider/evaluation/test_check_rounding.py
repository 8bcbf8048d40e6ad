"""What rounding explains in the statistics of `outrider check` follows the temperature."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import pytest

from kernels.sampling import SamplingParams
from outrider.evaluation import check
from outrider.evaluation.check_report import LOAD, Sampled
from outrider.evaluation.check_requests import Ask, Plan, Text
from outrider.evaluation.reference import Prefix
from outrider.evaluation.token_fit import Distribution

VOCABULARY, PROMPTS, TEXTS, TOKENS = 8, 8, 600, 3
ROUNDING = check.ROUNDING["bfloat16"]


def logits(prefix: Prefix, of: int = 1) -> Any:
    """Normal numbers that depend on the prefix alone."""
    return np.random.default_rng([of, prefix[0], *(token + 1 for token in prefix[1])]).normal(size=VOCABULARY)


def softmax(z: Any) -> Any:
    p = np.exp(z - z.max())
    return p / p.sum()


class Reference:
    """The target's distributions without errors of rounding."""

    async def distributions(self, wanted: Iterable[Prefix], progress: Callable[[int], None]) -> Any:
        found = {}
        for prefix in wanted:
            p = softmax(logits(prefix) / prefix[2].temperature)
            order = np.argsort(-p)
            found[prefix] = Distribution(order, p[order])
        return found


def results(temperature: float, of_service: float) -> list[Sampled]:
    """Those of a service in bfloat16 whose logits have errors of a sixth of `ROUNDING`, at its own temperature."""
    params, generator, texts = SamplingParams(temperature=temperature), np.random.default_rng(3), []
    for number in range(TEXTS):
        tokens: tuple[int, ...] = ()
        for _ in range(TOKENS):
            prefix = (number % PROMPTS, tokens, params)
            z = logits(prefix) + ROUNDING / 6 * logits(prefix, of=2)
            tokens += (int(generator.choice(VOCABULARY, p=softmax(z / of_service))),)
        texts.append(Text(Ask("tokenwise", number % PROMPTS, LOAD, {}, params), tokens, 1))
    reference, plan = cast("Any", Reference()), Plan(settings=(params,))
    return asyncio.run(check._statistics(texts, reference, ROUNDING, plan, lambda stage, done, total: None))


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_errors_of_rounding_are_no_bias_at_a_low_temperature(temperature: float) -> None:
    """A sixth of 0.2 nats is two thirds of a nat at temperature 0.05."""
    assert not any(each.is_biased for each in results(temperature, temperature))


def test_another_temperature_is_found_at_a_low_one() -> None:
    assert any(each.is_biased for each in results(0.1, 0.5))
