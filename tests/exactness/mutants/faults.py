"""One deliberate fault each, made in the process that is about to become a service; called by name (`FAULTS`).

Most of these have been in released systems, and each leaves text that looks right. A fault replaces a function where
the service looks it up, so everything around it is the service's own code.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from types import ModuleType
from typing import Any

import numpy as np
import torch

from draft_service.drafters import engine, ngram
from kernels import rng
from kernels.sampling import UNSURE, Draw, Sample
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from outrider.runtime import decode_loop
from tests.exactness.mutants import conditions


def shared_noise() -> None:
    """The draft draws its tokens with the numbers that the verifier will accept them by."""
    _redirect("draft_service.drafters.base", rng.Domain.DRAFT, rng.Domain.ACCEPT)


def shared_resampling() -> None:
    """The verifier draws the next token with the number that it rejected the drafted one by."""
    _redirect("kernels.verify", rng.Domain.RESAMPLE, rng.Domain.ACCEPT)


def repeated_noise() -> None:
    """The verifier's numbers do not depend on the round: every round of a sequence gets the same ones."""
    from kernels import verify

    _replace(verify, "uniform", lambda seed, base_length, *place: rng.uniform(seed, 0, *place))


def negative_residual() -> None:
    """The residual is p - q̂ as it comes, without max(0, ·)."""
    from kernels import verify_torch

    def residual(p: np.ndarray, ids: np.ndarray, q: np.ndarray) -> np.ndarray:
        rest = p.astype(np.float64)
        rest[ids] -= q
        return rest

    _replace(verify_torch, "residual", residual)


# ---------------------------------------------------------------------------------------------- draft probabilities


def untruncated_q() -> None:
    """The draft samples from q after top-k, top-p and the cut to q̂, and sends q as it was before them."""
    _send_all_of_q(SparseConfig(keep_mass=1.0), engine, decode_loop)


def untruncated_ngrams() -> None:
    """The same in the drafter `ngram`."""
    _send_all_of_q(SparseConfig(keep_mass=1.0, max_support=8), ngram)


def copies_with_probabilities() -> None:
    """The drafter `lookup` says that it drew what it copied, from half that token and half another."""

    def pretend(guesses: list[Any]) -> list[Any]:
        weights = np.ones(2, np.uint16)
        return [(t, SparseDistribution(np.sort([t, (t + 1) % 24]), weights, 2)) for t, _ in guesses]

    _change_guesses("lookup", "Copier", pretend)


def random_favours_low_ids() -> None:
    """The drafter `random` draws the low ids of its support more often, and says that it draws all alike."""
    honest = SparseDistribution.token_at
    SparseDistribution.token_at = lambda self, u: honest(self, u * u)  # type: ignore[method-assign]


def staged_draws_from_all_of_q() -> None:
    """In staged drafting, what comes after a rejected guess is drawn from q̂ and not from what is left of it."""
    from draft_service.drafters import staged

    _replace(staged, "resample", lambda u, guessed, q, token: q.token_at(u))


def eager_outcome_cache() -> None:
    """No fault, but what shows one: whoever asks waits until four outcomes have been drafted for."""
    from draft_service.drafters import outcome_cache
    from draft_service.drafters.engine import DraftEngine
    from draft_service.drafters.sequence import Close, Propose

    outcome_cache.MOST_BRANCHES = 4
    outcome_cache.SpareTime.steps = lambda self, now, width: 64  # type: ignore[method-assign]
    outcome_cache.Trial.choose = lambda self: True  # type: ignore[method-assign]
    honest = DraftEngine.receive

    def receive(self: DraftEngine, message: Propose | Close) -> None:
        while work := self.cache.work(time.perf_counter()):
            self.process(work, self.forward(work))
        honest(self, message)

    DraftEngine.receive = receive  # type: ignore[method-assign]


def branches_take_the_likeliest() -> None:
    """What is drafted ahead is each q̂'s likeliest token, as a guess of what may follow is, and sent as if drawn."""
    from draft_service.drafters.sequence import ModelSequence

    eager_outcome_cache()
    honest = ModelSequence.adopt

    def adopt(self: ModelSequence, branch: ModelSequence, gamma: int) -> None:
        for i, q in enumerate(branch.distributions):
            if isinstance(q, SparseDistribution):
                branch.tokens[branch.base + i] = int(q.ids[q.weights.argmax()])
        honest(self, branch, gamma)

    ModelSequence.adopt = adopt  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------- lengths


def unsure_after_sampling() -> None:
    """The draft ends a proposal where the token that it has drawn was unlikely, in place of a q̂ that is unsure."""

    def wrong(honest: Callable[..., Any], logits: torch.Tensor, draws: Sequence[Draw], config: SparseConfig) -> Any:
        samples = honest(logits, [draw._replace(max_entropy=math.inf) for draw in draws], config)
        return [
            each if each.q is None or -math.log(each.q.probability(each.token)) <= draw.max_entropy else Sample(UNSURE)
            for each, draw in zip(samples, draws, strict=True)
        ]

    _wrap_sample(wrong, engine, decode_loop)


def restless_lengths() -> None:
    """No fault: γ follows the last few rounds of its own text as closely as it can, over the whole range down to 0.

    Times are given, not measured, so that the texts are the same each time. The best γ is 0 where a third of the tokens
    stand, 1 at a half, 3 at four fifths.
    """
    from draft_service import speculation, statistics

    for name, value in {"OWN_GAIN": 1.0, "OWN_MARGIN": 1.0, "KNOWN_ROUNDS": 1, "PROBE_ROUNDS": 1}.items():
        setattr(speculation, name, value)
    for name, value in {
        "BEGIN_GAIN": 1.0, "SAME": 0.0, "FIRM_ROUNDS": 1, "PAUSE": 1, "REMEMBERED_OF_ONE": 3,
        "SHARED_WEIGHT": 0.5,
    }.items():  # fmt: skip
        setattr(statistics, name, value)
    costs = statistics.__dict__["CostModel"]
    costs.is_measured = True
    costs.cycle = lambda self, gamma: 1 + 0.35 * gamma


def restless_lengths_after_drafting() -> None:
    """As well, a proposal ends before its first token of an odd id."""
    from draft_service.drafters import sequence

    restless_lengths()
    honest = sequence.__dict__["Draft"]

    def proposal(tokens: list[int], distributions: list[Any], *rest: Any) -> Any:
        kept = len(list(takewhile(lambda token: token % 2 == 0, tokens)))
        return honest(tokens[:kept], distributions[:kept], *rest)

    _replace(sequence, "Draft", proposal)


# ---------------------------------------------------------------------------------------------------- sick drafters


def lookup_raises() -> None:
    """The drafter `lookup` fails every other time, and rests a little."""

    def broken(guesses: Any) -> Any:
        raise RuntimeError("out of order")

    _be_sick("lookup", "Copier", broken)


def ngram_stalls() -> None:
    """Every second proposal of the drafter `ngram` takes half a second, in which its thread does nothing else."""

    def late(guesses: Any) -> Any:
        time.sleep(0.5)
        return guesses

    _be_sick("ngram", "_Counter", late)


# ---------------------------------------------------------------------------------------------------- shared noise


def noise_of_the_next_position() -> None:
    """Under `coupled` the draft chooses by the noise of the token after the one it drafts."""
    _displace_noise("kernels.sampling", lambda places: [(seed, position + 1) for seed, position in places])


def noise_of_the_round() -> None:
    """Under `coupled` the verifier judges every token of a round by the noise of the first."""
    from kernels import verify_torch

    base = 0
    honest = verify_torch.__dict__["_walk_coupled"]

    def walk(rows: np.ndarray, start: int, proposal: Any) -> Any:
        nonlocal base
        base = proposal.base_length
        return honest(rows, start, proposal)

    _replace(verify_torch, "_walk_coupled", walk)
    _displace_noise("kernels.verify_torch", lambda places: [(seed, base) for seed, _ in places])


# ---------------------------------------------------------------------------------------------------------- helpers


def _displace_noise(name: str, displaced: Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int, int]]]) -> None:
    module = importlib.import_module(name)
    honest = module.__dict__["noise_rows"]
    _replace(module, "noise_rows", lambda places, V: honest(displaced(places), V))


def _redirect(name: str, domain: rng.Domain, to: rng.Domain) -> None:
    def uniform(seed: int, base_length: int, index: int, asked: rng.Domain, draw: int = 0) -> float:
        return rng.uniform(seed, base_length, index, to if asked == domain else asked, draw)

    _replace(importlib.import_module(name), "uniform", uniform)


def _send_all_of_q(config: SparseConfig, *modules: ModuleType) -> None:
    """Each drafted token is sampled as ever, and sent with all of the softmax."""

    def wrong(honest: Callable[..., Any], logits: torch.Tensor, draws: Sequence[Draw], cut: SparseConfig) -> Any:
        full = sparsify(torch.softmax(logits.float(), dim=-1), config)
        samples = honest(logits, draws, cut)
        return [each if each.q is None else each._replace(q=whole) for each, whole in zip(samples, full, strict=True)]

    _wrap_sample(wrong, *modules)


def _wrap_sample(wrong: Callable[..., Any], *modules: ModuleType) -> None:
    for module in modules:
        _replace(module, "sample", partial(wrong, module.__dict__["sample"]))


def _be_sick(drafter: str, guesser: str, how: Callable[[Any], Any]) -> None:
    """Every second proposal in the whole service is what `how` makes of it. Rests are short."""
    from draft_service.drafters import guard

    made = count()
    _change_guesses(drafter, guesser, lambda guesses: how(guesses) if next(made) % 2 else guesses)
    guard.FIRST_BACKOFF_S, guard.LONGEST_BACKOFF_S = 0.01, 0.02


def _change_guesses(drafter: str, guesser: str, change: Callable[[list[Any]], Any]) -> None:
    module = importlib.import_module(f"draft_service.drafters.{drafter}")
    honest = module.__dict__[guesser]

    class Changed(honest):  # type: ignore[misc, valid-type]
        def guess(self, count: int, ahead: Sequence[int] = ()) -> Any:
            return change(super().guess(count, ahead))

    _replace(module, guesser, Changed)


def _replace(module: ModuleType, name: str, value: Callable[..., Any]) -> None:
    if not callable(module.__dict__.get(name)):
        raise LookupError(f"{module.__name__} has no function {name}: the fault would change nothing")
    setattr(module, name, value)


FAULTS: dict[str, Callable[[], None]] = {
    name: each
    for module in (conditions, sys.modules[__name__])
    for name, each in vars(module).items()
    if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_")
}
