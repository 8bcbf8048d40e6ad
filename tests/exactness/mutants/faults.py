"""One deliberate fault each, made in the process that is about to become a service; called by name (`FAULTS`).

Most of these have been in released systems, and each leaves text that looks right. A fault replaces a function where
the service looks it up, so everything around it is the service's own code.
"""

import dataclasses
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
from kernels.sparse import SparseConfig, SparseDistribution
from outrider.runtime import decode_loop
from tests.exactness.mutants import conditions
from tests.kernels.cases import sparsify


def shared_noise() -> None:
    """The draft samples its tokens with the uniforms of their acceptance tests."""
    _redirect("draft_service.drafters.base", rng.Domain.DRAFT, rng.Domain.ACCEPT)


def shared_resampling() -> None:
    """The verifier samples the next token with the uniform of the failed acceptance test."""
    conditions.verification_by_torch()
    _redirect("kernels.verify", rng.Domain.RESAMPLE, rng.Domain.ACCEPT)


def repeated_noise() -> None:
    """The verifier's uniforms do not depend on the round: every round of a sequence gets the same ones."""
    from kernels import verify

    conditions.verification_by_torch()
    _replace(verify, "uniform", lambda seed, base_length, *counter: rng.uniform(seed, 0, *counter))


def draws_again_after_a_resume() -> None:
    """The verifier counts rounds from where a sequence was opened: after a resume it draws the same numbers again."""
    from kernels.verify import Rule
    from verifier_service.sequence import TargetSequence

    original = TargetSequence.proposed

    def proposed(self: TargetSequence, round_: Any) -> Any:
        found = original(self, round_)
        if found.rule is Rule.COUPLED:
            return found
        return dataclasses.replace(found, base_length=found.base_length - len(self.opening.committed))

    TargetSequence.proposed = proposed  # type: ignore[method-assign]


def negative_residual() -> None:
    """The residual is p - q̂, without max(0, ·)."""
    from kernels import verify_torch

    def residual(p: np.ndarray, ids: np.ndarray, q: np.ndarray) -> np.ndarray:
        rest = p.astype(np.float64)
        rest[ids] -= q
        return rest

    conditions.verification_by_torch()
    _replace(verify_torch, "residual", residual)


# ---------------------------------------------------------------------------------------------- draft probabilities


def untruncated_q() -> None:
    """The draft samples from q after top-k, top-p and the cut to q̂, and sends q from before them."""
    conditions.layers_by_torch()
    _send_all_of_q(SparseConfig(keep_mass=1.0), engine, decode_loop)


def neighbouring_q() -> None:
    """The drafter `parallel` sends the q̂ of the next token of the pass, if that has the drafted token."""
    original = engine.DraftEngine.draw

    def draw(self: engine.DraftEngine, work: Sequence[Any]) -> Any:
        return [_shifted(drawn) for drawn in original(self, work)]

    def _shifted(drawn: Sequence[Any]) -> list[Any]:
        sent = []
        for own, following in zip(drawn, [*drawn[1:], *drawn[:1]], strict=True):
            has_token = own.token in following.q.ids
            sent.append(own._replace(q=following.q) if has_token else own)
        return sent

    engine.DraftEngine.draw = draw  # type: ignore[method-assign]


def untruncated_ngrams() -> None:
    """The same in the drafter `ngram`."""
    _send_all_of_q(SparseConfig(keep_mass=1.0, max_support=8), ngram)


def copies_with_probabilities() -> None:
    """The drafter `lookup` sends q̂ of one half each for the token that it copied and another one."""

    def pretend(guesses: list[Any]) -> list[Any]:
        weights = np.ones(2, np.uint16)
        return [(t, SparseDistribution(np.sort([t, (t + 1) % 24]), weights, 2)) for t, _ in guesses]

    _change_guesses("cheap", "Copier", pretend)


def random_favours_low_ids() -> None:
    """The drafter `random` samples the low ids of its support more often, and sends equal weights."""
    original = SparseDistribution.token_at
    SparseDistribution.token_at = lambda self, u: original(self, u * u)  # type: ignore[method-assign]


def eager_outcome_cache() -> None:
    """No fault: a request waits until the cache has drafted for four outcomes, so that half of the proposals hit."""
    from draft_service.drafters import outcome_cache
    from draft_service.drafters.engine import DraftEngine
    from draft_service.drafters.sequence import Close, Propose

    outcome_cache.MOST_BRANCHES, DraftEngine.leaving_seconds = 4, 0.0  # a verdict may arrive before the half of a ms
    outcome_cache.SpareTime.steps = lambda self, now, width: 64  # type: ignore[method-assign]
    outcome_cache.Trial.choose = lambda self: True  # type: ignore[method-assign]
    original = DraftEngine.receive

    def receive(self: DraftEngine, message: Propose | Close) -> None:
        while work := self.cache.work(time.perf_counter()):
            self.process(work, self.forward(work))
        original(self, message)

    DraftEngine.receive = receive  # type: ignore[method-assign]


def branches_take_the_likeliest() -> None:
    """A branch of the outcome cache proposes each q̂'s most probable token, and sends q̂ as if it was sampled."""
    from draft_service.drafters.sequence import ModelSequence

    eager_outcome_cache()
    original = ModelSequence.adopt

    def adopt(self: ModelSequence, branch: ModelSequence, gamma: int) -> None:
        for i, q in enumerate(branch.distributions):
            if isinstance(q, SparseDistribution):
                branch.tokens[branch.base + i] = int(q.ids[q.weights.argmax()])
        original(self, branch, gamma)

    ModelSequence.adopt = adopt  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------------------------------- γ


def unsure_after_sampling() -> None:
    """The draft ends a proposal if the token that it sampled was improbable, in place of a q̂ of high entropy."""

    def wrong(original: Callable[..., Any], logits: torch.Tensor, draws: Sequence[Draw], config: SparseConfig) -> Any:
        samples = original(logits, [draw._replace(max_entropy=math.inf) for draw in draws], config)
        return [
            each if each.q is None or -math.log(each.q.probability(each.token)) <= draw.max_entropy else Sample(UNSURE)
            for each, draw in zip(samples, draws, strict=True)
        ]

    conditions.layers_by_torch()
    _wrap_sample(wrong, engine, decode_loop)


def restless_gamma() -> None:
    """No fault: γ follows the last few rounds of its own text as closely as it can, over the whole range down to 0.

    Times are constants, so that the texts are the same each time. The best γ is 0 if a third of the tokens are
    accepted, 1 at a half, 3 at four fifths.
    """
    from draft_service import speculation, statistics

    for name, value in {"OWN_GAIN": 1.0, "OWN_MARGIN": 1.0, "KNOWN_ROUNDS": 1, "FIRM_ROUNDS": 1}.items():
        setattr(speculation, name, value)
    for name, value in {
        "SAME": 0.0, "FIRM_ROUNDS": 1, "FIRST_PAUSE": 1, "LONGEST_PAUSE": 1,
        "REMEMBERED_OF_ONE": 3, "SHARED_WEIGHT": 0.5,
    }.items():  # fmt: skip
        setattr(statistics, name, value)
    costs = statistics.__dict__["CostModel"]
    costs.is_measured = costs.has_decoded = True
    costs.cycle_by_gamma = lambda self, drafts: lambda gamma: 1 + 0.35 * gamma


def gamma_after_drafting() -> None:
    """In addition, a proposal ends before its first token with an odd id."""
    from draft_service.drafters import sequence

    restless_gamma()
    original = sequence.__dict__["Draft"]

    def proposal(tokens: list[int], distributions: list[Any], *rest: Any) -> Any:
        kept = len(list(takewhile(lambda token: token % 2 == 0, tokens)))
        return original(tokens[:kept], distributions[:kept], *rest)

    _replace(sequence, "Draft", proposal)


# ------------------------------------------------------------------------------------------------- failing drafters


def lookup_raises() -> None:
    """Every second proposal of the drafter `lookup` raises an error."""

    def broken(guesses: Any) -> Any:
        raise RuntimeError("out of order")

    _fail_every_second("cheap", "Copier", broken)


def ngram_stalls() -> None:
    """Every second proposal of the drafter `ngram` takes a tenth of a second, in which its thread does nothing else."""

    def late(guesses: Any) -> Any:
        time.sleep(0.1)
        return guesses

    _fail_every_second("ngram", "_Counter", late)


def encoder_input_raises() -> None:
    """The input of the draft's encoder cannot be computed."""
    from outrider.service.encoder_input import EncoderInputs

    async def raising(self: EncoderInputs, *_: Any, **__: Any) -> Any:
        raise MemoryError("no features")

    EncoderInputs.checked_tensor = raising  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------- shared noise


def noise_of_the_next_position() -> None:
    """Under `coupled` the draft uses the noise of the position after the one that it drafts."""
    conditions.layers_by_torch()
    _displace_noise("kernels.sampling", lambda positions: [(seed, position + 1) for seed, position in positions])


def noise_of_the_round() -> None:
    """Under `coupled` the verifier uses the noise of a round's first position for all of its tokens."""
    from kernels import verify_torch

    base = 0
    original = verify_torch.__dict__["_walk_coupled"]

    def walk(rows: np.ndarray, proposal: Any) -> Any:
        nonlocal base
        base = proposal.base_length
        return original(rows, proposal)

    conditions.verification_by_torch()
    _replace(verify_torch, "_walk_coupled", walk)
    _displace_noise("kernels.verify_torch", lambda positions: [(seed, base) for seed, _ in positions])


# ---------------------------------------------------------------------------------------------------------- helpers


def _displace_noise(name: str, displaced: Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int, int]]]) -> None:
    module = importlib.import_module(name)
    original = module.__dict__["noise_rows"]
    _replace(module, "noise_rows", lambda positions, V: original(displaced(positions), V))


def _redirect(name: str, domain: rng.Domain, to: rng.Domain) -> None:
    def uniform(seed: int, base_length: int, index: int, own: rng.Domain, draw: int = 0) -> float:
        return rng.uniform(seed, base_length, index, to if own == domain else own, draw)

    _replace(importlib.import_module(name), "uniform", uniform)


def _send_all_of_q(config: SparseConfig, *modules: ModuleType) -> None:
    """Sample each drafted token as before, and send it with the whole softmax."""

    def wrong(original: Callable[..., Any], logits: torch.Tensor, draws: Sequence[Draw], cut: SparseConfig) -> Any:
        full = sparsify(torch.softmax(logits.float(), dim=-1), config)
        samples = original(logits, draws, cut)
        return [each if each.q is None else each._replace(q=whole) for each, whole in zip(samples, full, strict=True)]

    _wrap_sample(wrong, *modules)


def _wrap_sample(wrong: Callable[..., Any], *modules: ModuleType) -> None:
    for module in modules:
        _replace(module, "sample", partial(wrong, module.__dict__["sample"]))


def _fail_every_second(drafter: str, guesser: str, how: Callable[[Any], Any]) -> None:
    """Pass every second proposal of the whole service through `how`. Backoffs are short."""
    from draft_service.drafters import guard

    made = count()
    _change_guesses(drafter, guesser, lambda guesses: how(guesses) if next(made) % 2 else guesses)
    guard.FIRST_BACKOFF_S, guard.LONGEST_BACKOFF_S = 0.01, 0.02


def _change_guesses(drafter: str, guesser: str, change: Callable[[list[Any]], Any]) -> None:
    module = importlib.import_module(f"draft_service.drafters.{drafter}")
    original = module.__dict__[guesser]

    class Changed(original):  # type: ignore[misc, valid-type]
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
