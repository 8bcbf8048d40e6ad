"""The policies once more, on recorded texts and given times: what each would have come to, free of the machine's noise.

Under `coupled` and at T = 0 the draft's choice after each prefix of a text does not depend on the rounds. So those of
one long γ tell at which places draft and target agree, and with that what every other length would have given, round by
round: by the services' own policies, by each fixed γ, and by an oracle that drafts just what will be accepted [L 3.5].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draft_service.adaptive import FIRST_PAUSE, Adaptive
from draft_service.experience import Experience, Times
from draft_service.speculation import Fixed, Heuristic, Policy, Round
from outrider.service.cost_model import CostLine
from outrider.theory import oracle_rate

FIRST_GAMMA = 5

RecordedRound = Sequence[int]
"""Output tokens before it, drafted tokens, accepted ones."""


@dataclass(frozen=True, slots=True)
class GivenTimes:
    """What a round takes, in seconds: γ drafts, a pass over γ + 1 tokens, the rest; and a token of the target alone."""

    draft_fixed: float
    draft_token: float
    pass_fixed: float
    pass_token: float
    rest: float
    alone: float

    def document(self) -> dict[str, float]:
        """As JSON."""
        return {name: round(value, 6) for name, value in asdict(self).items()}

    @property
    def verify(self) -> CostLine:
        """The target's pass."""
        return CostLine(self.pass_fixed, self.pass_token)

    def draft(self, drafted: int) -> float:
        """What it takes to draft so many tokens."""
        return self.draft_fixed + self.draft_token * drafted if drafted else 0.0

    def round(self, drafted: int) -> float:
        """A round of so many drafts; of none, a token of the target alone."""
        return self.draft(drafted) + self.verify.seconds(drafted + 1) + self.rest if drafted else self.alone


def agreements(rounds: Sequence[RecordedRound]) -> list[bool]:
    """Whether draft and target agree at each place of a text.

    Of a proposal that was accepted whole the next token is the target's own, and nothing is known of the draft there:
    it is taken to agree, as it did before.
    """
    found: list[bool] = []
    for output_length, drafted, accepted in rounds:
        if output_length != len(found):
            raise ValueError(f"a round begins at {output_length}; the rounds before it end at {len(found)}")
        found += [True] * accepted
        found.append(accepted == drafted)
    return found


def replay(policy: Policy, agrees: Sequence[bool], times: GivenTimes, ceiling: int) -> tuple[int, float, int]:
    """Write one text by a policy; returns tokens, seconds and the sum of γ over rounds."""
    at, seconds, lengths = 0, 0.0, 0
    after_proposal = False
    while at < len(agrees):
        most = min(ceiling, len(agrees) - at - 1)
        gamma = policy.next(most)
        if gamma == 0:
            tokens = min(max(1, policy.pause), len(agrees) - at)
            for nth in range(tokens):
                policy.observe(Round(0, waited=times.alone if nth else None, pass_cost=times.verify))
            at, seconds, after_proposal = at + tokens, seconds + tokens * times.alone, False
            continue
        accepted = _run(agrees, at, gamma)
        waited = times.verify.seconds(gamma + 1) + times.rest
        policy.observe(
            Round(
                gamma,
                gamma,
                min(accepted + 1, gamma),
                accepted,
                drafting=times.draft(gamma) if after_proposal else None,
                waited=waited if at else None,
                pass_tokens=gamma + 1,
                pass_cost=times.verify,
            )
        )
        at += accepted + 1
        seconds += times.draft(gamma) + waited
        lengths += gamma
        after_proposal = True
    return len(agrees), seconds, lengths


def rates(texts: Sequence[Sequence[bool]], times: GivenTimes, fixed: Sequence[int], ceiling: int) -> dict[str, Any]:
    """Tokens a second of every policy over the texts, one after another, and of the oracle."""
    experience, known = Experience(first_pause=FIRST_PAUSE), Times()
    arms: dict[str, Callable[[], Policy]] = {f"fixed {gamma}": lambda gamma=gamma: Fixed(gamma) for gamma in fixed}  # type: ignore[misc]
    arms["heuristic"] = lambda: Heuristic(FIRST_GAMMA, ceiling=ceiling)
    arms["adaptive"] = lambda: Adaptive(FIRST_GAMMA, ceiling=ceiling, experience=experience, times=known)
    found = {"alone": 1 / times.alone}
    for name, begin in arms.items():
        runs = [replay(begin(), agrees, times, ceiling) for agrees in texts]
        found[name] = sum(tokens for tokens, _, _ in runs) / sum(seconds for _, seconds, _ in runs)
    accepted = [count for agrees in texts for count in _oracle_rounds(agrees, times, ceiling)]
    found["oracle"] = oracle_rate(accepted, times.round)
    return {name: round(rate, 2) for name, rate in found.items()}


def counted_rate(times: GivenTimes, tokens: int, rounds: int, drafted: int) -> float:
    """Tokens a second of so many tokens in so many rounds, for which so many were drafted."""
    fixed = times.draft_fixed + times.verify.seconds(1) + times.rest
    return tokens / (rounds * fixed + drafted * (times.draft_token + times.pass_token))


def _oracle_rounds(agrees: Sequence[bool], times: GivenTimes, ceiling: int) -> list[int]:
    """The lengths of an oracle's rounds: what will be accepted, or none where that is sooner written alone."""
    rounds, at = [], 0
    while at < len(agrees):
        run = _run(agrees, at, min(ceiling, len(agrees) - at - 1))
        rounds.append(run if times.round(run) < (run + 1) * times.alone else 0)
        at += rounds[-1] + 1
    return rounds


def _run(agrees: Sequence[bool], at: int, most: int) -> int:
    """How many places from here on agree, up to a number."""
    run = 0
    while run < most and agrees[at + run]:
        run += 1
    return run
