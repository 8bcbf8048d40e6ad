"""One deliberate fault each, made in the process that is about to become a service.

Most of these have been in released systems, and each leaves text that looks right. A fault replaces a function where
the service looks it up, so everything around it is the service's own code. Some are no faults at all but the conditions
under which one shows (`zero_uniform`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from draft_service.drafters import engine, ngram
from kernels import rng
from kernels.sampling import UNSURE, Draw, Sample
from kernels.sparse import SparseConfig, sparsify
from outrider.runtime import decode_loop
from tests.exactness.mutants import conditions


def shared_noise() -> None:
    """The draft draws its tokens with the numbers that the verifier will accept them by."""
    from draft_service.drafters import base

    _replace(base, "uniform", _redirected({rng.Domain.DRAFT: rng.Domain.ACCEPT}))


def shared_resampling() -> None:
    """The verifier draws the next token with the number that it rejected the drafted one by."""
    from kernels import verify

    _replace(verify, "uniform", _redirected({rng.Domain.RESAMPLE: rng.Domain.ACCEPT}))


def repeated_noise() -> None:
    """The verifier's numbers do not depend on the round: every round of a sequence gets the same ones."""
    from kernels import verify

    def uniform(seed: int, base_length: int, index: int, domain: rng.Domain, draw: int = 0) -> float:
        return rng.uniform(seed, 0, index, domain, draw)

    _replace(verify, "uniform", uniform)


def untruncated_q() -> None:
    """The draft samples from q after top-k, top-p and the cut to q̂, and sends q as it was before them."""
    _tell_all_of_q(SparseConfig(keep_mass=1.0), engine, decode_loop)


def unsure_after_sampling() -> None:
    """The draft ends a proposal where the token that it has drawn was unlikely, in place of a law that is unsure."""

    def wrong(honest: Callable[..., Any], logits: torch.Tensor, draws: Sequence[Draw], config: SparseConfig) -> Any:
        samples = honest(logits, [draw._replace(max_entropy=math.inf) for draw in draws], config)
        return [
            each if each.q is None or -math.log(each.q.probability(each.token)) <= draw.max_entropy else Sample(UNSURE)
            for each, draw in zip(samples, draws, strict=True)
        ]

    _wrap_sample(wrong, engine, decode_loop)


def lengths_after_drafting() -> None:
    """The length of a proposal is chosen once it has been drafted: it ends before the first token of an odd id."""
    from itertools import takewhile

    from draft_service.drafters import sequence

    honest = sequence.__dict__["Draft"]

    def proposal(tokens: list[int], laws: list[Any], *rest: Any) -> Any:
        kept = len(list(takewhile(lambda token: token % 2 == 0, tokens)))
        return honest(tokens[:kept], laws[:kept], *rest)

    _replace(sequence, "Draft", proposal)


def restless_lengths() -> None:
    """No fault: γ follows the last few rounds of its own text as closely as it can, over the whole range down to 0.

    Times are given, not measured, so that the texts are the same each time. The best γ is 0 where a third of the tokens
    stand, 1 at a half, 3 at four fifths.
    """
    from draft_service import speculation, statistics

    for name, value in {"OWN_GAIN": 1.0, "OWN_MARGIN": 1.0, "KNOWN_ROUNDS": 1, "PROBE_ROUNDS": 1}.items():
        setattr(speculation, name, value)
    for name, value in {
        "BEGIN_GAIN": 1.0, "SAME": 0.0, "FIRM_ROUNDS": 1, "FIRST_PAUSE": 1, "LONGEST_PAUSE": 2, "REMEMBERED_OF_ONE": 3,
        "SHARED_WEIGHT": 0.5,
    }.items():  # fmt: skip
        setattr(statistics, name, value)
    costs = statistics.__dict__["CostModel"]
    costs.known = True
    costs.cycle = lambda self, gamma: 1 + 0.35 * gamma


def restless_lengths_after_drafting() -> None:
    """Both."""
    restless_lengths()
    lengths_after_drafting()


def untruncated_ngrams() -> None:
    """As `untruncated_q`, in the drafter `ngram`."""
    _tell_all_of_q(SparseConfig(keep_mass=1.0, max_support=8), ngram)


def copies_with_a_law() -> None:
    """The drafter `lookup` says that it drew what it copied, from half that token and half another."""
    from draft_service.drafters import lookup
    from kernels.sparse import SparseDistribution

    honest = lookup.__dict__["Copier"]

    class Pretending(honest):  # type: ignore[misc, valid-type]
        def guess(self, count: int, ahead: Sequence[int] = ()) -> Any:
            tokens = [token for token, _ in super().guess(count, ahead)]
            return [
                (token, SparseDistribution(np.sort([token, (token + 1) % 24]), np.ones(2, np.uint16), 2))
                for token in tokens
            ]

    _replace(lookup, "Copier", Pretending)


def random_favours_low_ids() -> None:
    """The drafter `random` draws the low ids of its support more often, and says that it draws all alike."""
    from kernels.sparse import SparseDistribution

    honest = SparseDistribution.token_at
    SparseDistribution.token_at = lambda self, u: honest(self, u * u)  # type: ignore[method-assign]


def sick(
    how: Callable[[Any], Any], when: Callable[[int], bool] = lambda number: number % 2 == 1, *, copies: bool = True
) -> None:
    """Proposals of `lookup`, or else `ngram`, counted from 0 in the whole service, are what `how` makes of them where
    `when` says so. Rests are short.
    """
    from draft_service.drafters import guard, lookup, ngram

    module: ModuleType = lookup if copies else ngram
    name = "Copier" if copies else "_Counter"
    honest = module.__dict__[name]
    made = iter(range(1 << 30))

    class Sick(honest):  # type: ignore[misc, valid-type]
        def guess(self, count: int, ahead: Sequence[int] = ()) -> Any:
            guesses = super().guess(count, ahead)
            return how(guesses) if when(next(made)) else guesses

    _replace(module, name, Sick)
    guard.FIRST_REST_S, guard.LONGEST_REST_S = 0.01, 0.02


def _broken(guesses: Any) -> Any:
    raise RuntimeError("out of order")


def lookup_raises() -> None:
    """The drafter `lookup` fails every other time."""
    sick(_broken)


def lookup_raises_for_a_while() -> None:
    """The drafter `lookup` fails three times, and is well from then on."""
    sick(_broken, when=lambda number: 1 <= number <= 3)


def lookup_never_works() -> None:
    """The drafter `lookup` fails always."""
    sick(_broken, when=lambda number: True)


def lookup_answers_nonsense() -> None:
    """The drafter `lookup` proposes a token that does not exist."""
    sick(lambda guesses: [(1 << 20, None) for _ in guesses])


def ngram_stalls() -> None:
    """Every second proposal of the drafter `ngram` takes half a second, in which its thread does nothing else."""
    import time

    def late(guesses: Any) -> Any:
        time.sleep(0.5)
        return guesses

    sick(late, copies=False)


def staged_draws_from_the_whole_law() -> None:
    """In staged drafting, what comes after a rejected guess is drawn from q̂ and not from what is left of it."""
    from draft_service.drafters import staged
    from kernels.sparse import SparseDistribution

    def resample(u: float, guessed: SparseDistribution | None, law: SparseDistribution, token: int) -> int:
        return law.token_at(u)

    _replace(staged, "resample", resample)


def negative_residual() -> None:
    """The residual is p - q̂ as it comes, without max(0, ·)."""
    from kernels import verify_torch

    def residual(p: np.ndarray, ids: np.ndarray, q: np.ndarray) -> np.ndarray:
        rest = p.astype(np.float64)
        rest[ids] -= q
        return rest

    _replace(verify_torch, "residual", residual)


def zero_uniform() -> None:
    """Every acceptance test draws exactly 0, as one in 2^53 may: no fault, but where `<=` shows."""
    from kernels import verify

    def uniform(seed: int, base_length: int, index: int, domain: rng.Domain, draw: int = 0) -> float:
        return 0.0 if domain == rng.Domain.ACCEPT else rng.uniform(seed, base_length, index, domain, draw)

    _replace(verify, "uniform", uniform)


def zero_uniform_and_weak_inequality() -> None:
    """As `zero_uniform`, and a drafted token stands where u · l · q̂ <= p."""
    from kernels import verify_torch

    zero_uniform()
    _replace(verify_torch, "accepts", lambda u, lenience, q, p: q > 0 and u * lenience * q <= p)


def noise_of_the_next_position() -> None:
    """Under `coupled` the draft chooses by the noise of the token after the one it drafts."""
    _displace_noise("kernels.sampling", lambda places: [(seed, position + 1) for seed, position in places])


def noise_of_another_seed() -> None:
    """Under `coupled` the draft has noise of its own."""
    _displace_noise("kernels.sampling", lambda places: [(seed ^ 1, position) for seed, position in places])


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


def eager_outcome_cache() -> None:
    """No fault, but what shows one: whoever asks waits until four outcomes have been drafted for."""
    import time

    from draft_service.drafters import outcome_cache
    from draft_service.drafters.engine import DraftEngine
    from draft_service.drafters.sequence import Ask, Close

    outcome_cache.MOST_BRANCHES = 4
    outcome_cache.SpareTime.steps = lambda self, now, width: 64  # type: ignore[method-assign]
    outcome_cache.Trial.choose = lambda self: True  # type: ignore[method-assign]
    honest = DraftEngine.receive

    def receive(self: DraftEngine, message: Ask | Close) -> None:
        while work := self.cache.work(time.perf_counter()):
            self.process(work, self.forward(work))
        honest(self, message)

    DraftEngine.receive = receive  # type: ignore[method-assign]


def branches_take_the_likeliest() -> None:
    """What is drafted ahead is each law's likeliest token, as a guess of what may follow is, and told as if drawn."""
    from draft_service.drafters.sequence import ModelSequence
    from kernels.sparse import SparseDistribution

    eager_outcome_cache()
    honest = ModelSequence.adopt

    def adopt(self: ModelSequence, branch: ModelSequence, gamma: int) -> None:
        for i, law in enumerate(branch.laws):
            if isinstance(law, SparseDistribution):
                branch.tokens[branch.base + i] = int(law.ids[law.weights.argmax()])
        honest(self, branch, gamma)

    ModelSequence.adopt = adopt  # type: ignore[method-assign]


def _displace_noise(name: str, displaced: Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int, int]]]) -> None:
    module = importlib.import_module(name)
    honest = module.__dict__["noise_rows"]
    _replace(module, "noise_rows", lambda places, V: honest(displaced(places), V))


def _tell_all_of_q(config: SparseConfig, *modules: ModuleType) -> None:
    """Each drafted token is sampled as ever, and sent with all of the softmax."""

    def wrong(honest: Callable[..., Any], logits: torch.Tensor, draws: Sequence[Draw], cut: SparseConfig) -> Any:
        full = sparsify(torch.softmax(logits.float(), dim=-1), config)
        samples = honest(logits, draws, cut)
        return [each if each.q is None else each._replace(q=whole) for each, whole in zip(samples, full, strict=True)]

    _wrap_sample(wrong, *modules)


def _wrap_sample(wrong: Callable[..., Any], *modules: ModuleType) -> None:
    for module in modules:
        _replace(module, "sample", partial(wrong, module.__dict__["sample"]))


def _replace(module: ModuleType, name: str, value: Callable[..., Any]) -> None:
    if not callable(module.__dict__.get(name)):
        raise LookupError(f"{module.__name__} has no function {name}: the fault would change nothing")
    setattr(module, name, value)


def _redirected(domains: dict[rng.Domain, rng.Domain]) -> Callable[..., float]:
    def uniform(seed: int, base_length: int, index: int, domain: rng.Domain, draw: int = 0) -> float:
        return rng.uniform(seed, base_length, index, domains.get(domain, domain), draw)

    return uniform


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        shared_noise,
        shared_resampling,
        repeated_noise,
        untruncated_q,
        unsure_after_sampling,
        lengths_after_drafting,
        restless_lengths,
        restless_lengths_after_drafting,
        negative_residual,
        zero_uniform,
        zero_uniform_and_weak_inequality,
        untruncated_ngrams,
        copies_with_a_law,
        random_favours_low_ids,
        lookup_raises,
        lookup_answers_nonsense,
        lookup_raises_for_a_while,
        lookup_never_works,
        ngram_stalls,
        staged_draws_from_the_whole_law,
        noise_of_the_next_position,
        noise_of_another_seed,
        noise_of_the_round,
        conditions.stubborn,
        conditions.unhurried,
        conditions.impatient_keepalive,
        conditions.briskly_interpreted,
        conditions.crowded,
        conditions.slow_steps,
        conditions.broken_components,
        eager_outcome_cache,
        branches_take_the_likeliest,
        conditions.dies_after_every_round,
        conditions.dies_thrice,
        conditions.poisoned_step,
        conditions.deadly_step,
        conditions.scheduler_breaks,
    )
}
"""By name."""
