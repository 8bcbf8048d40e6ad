"""The choice between one token a pass and several: the faster one, by judged rounds, for each kind of request."""

import random
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from draft_service import speculation
from draft_service.drafters.base import DrafterKind
from draft_service.request import CheckedRequest
from draft_service.sequence import Round
from draft_service.speculation import GammaController
from draft_service.tokens_per_pass import FIRST_WAIT, MOST_WAIT, PassChoices
from kernels.verify import Rule
from outrider.service.metrics import Metrics
from protos.outrider.v1 import speculation_pb2
from tests.draft_service.records import generation

ROUNDS = 16  # of one request


def serve(choices: PassChoices, kind: str, gain: float, requests: int, *, active: int = 1) -> Counter[int]:
    """Rounds of 1 to 5 tokens in 10 ms; with s = 4 they take less by the factor `gain`. Counts the choices."""
    noise, chosen = random.Random(1), Counter[int]()
    for _ in range(requests):
        s = choices.choose(kind, 4)
        chosen[s] += 1
        for _ in range(ROUNDS):
            seconds = 0.01 / (gain if s > 1 else 1.0)
            choices.add(kind, s, tokens=noise.randint(1, 5), seconds=seconds, active=active)
    return chosen


@pytest.mark.parametrize(("gain", "best"), [(1.3, 4), (0.8, 1)])
def test_the_faster_one_is_taken_and_the_other_ever_more_rarely(gain: float, best: int) -> None:
    choices = PassChoices()
    first = serve(choices, "cold", gain, 8 * FIRST_WAIT)
    assert first[4] >= 2
    assert gain > 1 or first[4] <= 4
    then = serve(choices, "cold", gain, 20 * MOST_WAIT)
    assert 15 <= 20 * MOST_WAIT - then[best] <= 30


def test_a_change_is_followed_and_kinds_and_loads_are_measured_apart() -> None:
    choices = PassChoices()
    serve(choices, "cold", 1.3, 400)
    assert serve(choices, "hot", 0.8, 400)[1] > 300
    assert serve(choices, "cold", 1.3, 400)[4] > 350
    assert serve(choices, "cold", 0.8, 400, active=8)[1] > 300
    assert serve(choices, "cold", 0.8, 1000)[1] > 500, "slower now"
    assert serve(choices, "cold", 0.8, 400)[1] > 350


@pytest.mark.parametrize("gain", [1.3, 0.8])
def test_a_pause_does_not_change_the_choice(gain: float) -> None:
    """A verifier that stands still for a minute, or failover, makes one round of thousands long."""
    choices = PassChoices()
    serve(choices, "cold", gain, 400)
    best = 4 if gain > 1 else 1
    choices.add("cold", best, tokens=3, seconds=60.0, active=1)
    assert serve(choices, "cold", gain, 400)[best] > 350


def test_one_token_a_pass_is_no_choice() -> None:
    choices = PassChoices()
    assert {choices.choose("cold", 1) for _ in range(10 * FIRST_WAIT)} == {1}


def request(**fields: Any) -> CheckedRequest:
    how: dict[str, Any] = {"drafter": DrafterKind.PARALLEL, "tokens_per_pass": 4, "chooses_tokens_per_pass": True}
    return generation(Rule.TOKENWISE, **(how | fields))


def write(controller: GammaController, asked: CheckedRequest, texts: int, *, better: int = 4) -> None:
    """Texts of which each round accepts all tokens with s = `better`, and none with the other s, of 1 and 4."""
    for _ in range(texts):
        settled = controller.with_tokens_per_pass(asked)
        gamma = controller.of(settled, lambda: 0)
        accepted = 4 if settled.draft_sequence.tokens_per_pass == better else 0
        for _ in range(ROUNDS + 1):  # the first one reads the prompt
            gamma.next(4)
            gamma.judged(Round(1), speculation_pb2.Verdict(token_ids=[1] * (accepted + 1)))


def chosen(controller: GammaController, asked: CheckedRequest) -> int:
    return Counter(
        controller.with_tokens_per_pass(asked).draft_sequence.tokens_per_pass for _ in range(100)
    ).most_common(1)[0][0]


def test_a_request_that_names_it_or_shares_its_draws_neither_teaches_nor_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts of one seed share draws, and acceptance depends on them. Each reading of the clock is 1 ms later."""
    milliseconds = count()
    clock = SimpleNamespace(perf_counter=lambda: next(milliseconds) / 1000)
    monkeypatch.setattr(speculation, "time", clock)
    controller = GammaController(Metrics())
    named, seeded = request(chooses_tokens_per_pass=False), request(seed_is_fresh=False)
    assert controller.with_tokens_per_pass(named).draft_sequence.tokens_per_pass == 4
    for each in (named, seeded):
        write(controller, each, 200)
        assert chosen(controller, request()) == 1, "as without measurements"
    write(controller, request(), 200)
    assert chosen(controller, request()) == 4
    write(controller, request(temperature=0.5), 200, better=1)
    assert chosen(controller, request(temperature=0.5)) == 1
    assert chosen(controller, request(temperature=0.5, seed_is_fresh=False)) == 4, "as the service was told"
