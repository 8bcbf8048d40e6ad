"""Who verifies in `benchmarks.kernel`, and what: logits of a Zipf-like distribution, and drafts of one near it.

Outrider, transformers' own function, plain torch, torch.compile, FlashInfer. All but Outrider take the whole of q;
transformers and plain torch turn both models' logits to float32 first, as transformers' own loop does.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from benchmarks.clocks import Work
from kernels.dense import DraftLogits, SigmoidScales
from kernels.rng import Domain, gumbel, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule, implementations, verify

MAX_GAMMA = 20
BASE_LENGTH = 1000
_EXPONENT = 1.5  # p ∝ rank^-1.5: the best 64 of 128k tokens have nine tenths of the mass
_APART = 0.7  # standard deviation of draft and target logits from each other
_SUPPORT = SparseConfig(keep_mass=0.99, max_support=64)
_SCALES = SigmoidScales(-1e3, 1e3)


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of γ drafted tokens over a vocabulary of V."""

    V: int
    B: int
    gamma: int
    rule: Rule = Rule.TOKENWISE

    def keys(self) -> dict[str, Any]:
        """As JSON."""
        return {"V": self.V, "B": self.B, "gamma": self.gamma, "rule": self.rule.value}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence of `MAX_GAMMA` drafts, which those of all others are copies of.

    Attributes:
        logits: `[MAX_GAMMA + 1, V]`.
        draft_logits: `[MAX_GAMMA, V]`.
        q: q̂ of each draft, `[MAX_GAMMA]`.
    """

    logits: Tensor
    draft_logits: Tensor
    q: Sequence[SparseDistribution]

    @classmethod
    def make(cls, V: int, dtype: torch.dtype, device: torch.device) -> Rows:
        """Draws them, always the same."""
        source = torch.Generator().manual_seed(V)
        ranks = torch.stack([torch.randperm(V, generator=source) for _ in range(MAX_GAMMA + 1)])
        logits = -_EXPONENT * (1 + ranks).log()
        apart = _APART * torch.randn(MAX_GAMMA, V, generator=source)
        draft_logits = (logits[:-1] + apart).to(dtype)
        q = sparsify(torch.softmax(draft_logits.float(), dim=-1), _SUPPORT)
        return cls(logits.to(dtype).to(device), draft_logits.to(device), q)


class Case:
    """One shape, filled."""

    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.shape = shape
        self._rows = rows

    @cached_property
    def logits(self) -> Tensor:
        """The target's, `[B, γ+1, V]`."""
        shape = self.shape
        return self._rows.logits[: shape.gamma + 1].repeat(shape.B, 1, 1)

    @cached_property
    def draft_logits(self) -> Tensor:
        """The draft's, `[B, γ, V]`: what is read by those who take the whole of q."""
        return self._rows.draft_logits[: self.shape.gamma].repeat(self.shape.B, 1, 1)

    @cached_property
    def drafted(self) -> Tensor:
        """Tokens drawn from the whole of q, int64 `[B, γ]`."""
        source = torch.Generator().manual_seed(self.shape.B)
        q = torch.softmax(self._rows.draft_logits[: self.shape.gamma].cpu().float(), dim=-1)
        drawn = torch.multinomial(q, self.shape.B, replacement=True, generator=source)
        return drawn.T.contiguous().to(self._rows.logits.device)

    @cached_property
    def proposals(self) -> list[Proposed]:
        """As Outrider takes them: tokens drawn from q̂, or by the shared noise under `coupled`."""
        shape, kept = self.shape, self._rows.q[: self.shape.gamma]
        plain = SamplingParams()
        if shape.rule is Rule.COUPLED:
            return [Proposed(self._coupled_tokens(), (), plain, 0, BASE_LENGTH, Rule.COUPLED)] * shape.B
        q: tuple[Any, ...] = tuple(kept)
        scales = None
        if shape.rule is Rule.SIGMOID:
            q = tuple(DraftLogits(row) for row in self._rows.draft_logits[: shape.gamma].to(torch.float16))
            scales = _SCALES
        return [
            Proposed(
                tuple(each.token_at(uniform(b, BASE_LENGTH, i, Domain.DRAFT)) for i, each in enumerate(kept)),
                q, plain, b, BASE_LENGTH, shape.rule, sigmoid=scales,
            )
            for b in range(shape.B)
        ]  # fmt: skip

    @property
    def must_bytes(self) -> int:
        """What must move at the least: each row of logits once; under `sigmoid` the draft's too."""
        shape = self.shape
        rows = shape.B * (shape.gamma + 1) + (shape.B * shape.gamma if shape.rule is Rule.SIGMOID else 0)
        return rows * shape.V * self._rows.logits.element_size()

    def _coupled_tokens(self) -> tuple[int, ...]:
        gamma = self.shape.gamma
        noise = gumbel(0, range(BASE_LENGTH, BASE_LENGTH + gamma), self.shape.V)
        scores = torch.log_softmax(self._rows.draft_logits[:gamma].cpu().float(), dim=-1) + noise
        return tuple(scores.argmax(dim=-1).tolist())


# ----------------------------------------------------------------------------------------------------------- contenders

MOST_IN_TURN = 16
"""Sequences that a contender without batches takes one after the other; more would only take longer."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A contender that has a case in hand.

    Attributes:
        run: what is timed: from logits on the device to results on the device.
        whole: the same with all that the host does before and after, where that is not in `run`.
        accepted: runs once more; drafted tokens accepted a sequence.
        graphable: whether `run` may be captured in a CUDA graph.
    """

    run: Work
    accepted: Callable[[], float]
    graphable: bool
    whole: Work | None = None


class Contender(ABC):
    """A way to verify."""

    @abstractmethod
    def refusal(self, case: Case) -> str | None:
        """Why it does not take the case; None where it does."""

    @abstractmethod
    def start(self, case: Case) -> Ready:
        """Takes the case in hand."""


class Outrider(Contender):
    """`kernels.verify` by the path named; of `triton` the launches are timed apart from packing and copying."""

    def __init__(self, path: str) -> None:
        self.path = path

    def refusal(self, case: Case) -> str | None:
        if self.path not in implementations():
            return f"this build has {', '.join(implementations())}"
        rules = importlib.import_module(f"kernels.verify_{self.path}").RULES
        return None if case.shape.rule in rules else f"{self.path} does not know the rule {case.shape.rule.value}"

    def start(self, case: Case) -> Ready:
        logits = case.logits.flatten(0, 1)

        def whole() -> Any:
            return verify(logits, case.proposals, self.path)

        def accepted() -> float:
            return sum(result.accepted for result in whole()) / case.shape.B

        if self.path != "triton":
            return Ready(whole, accepted, graphable=False, whole=whole)
        launch: Any = importlib.import_module("kernels.verify_triton").prepare(logits, case.proposals)
        return Ready(launch.run, accepted, graphable=True, whole=whole)


class Transformers(Contender):
    """transformers' `_speculative_sampling`, a sequence at a time: it takes no batch."""

    def refusal(self, case: Case) -> str | None:
        if case.shape.rule is not Rule.TOKENWISE:
            return f"it does not know the rule {case.shape.rule.value}"
        return None if case.shape.B <= MOST_IN_TURN else f"it takes one sequence at a time, not {case.shape.B}"

    def start(self, case: Case) -> Ready:
        logits, draft_logits, drafted = case.logits, case.draft_logits, case.drafted

        def run() -> list[Any]:
            return [
                _speculative_sampling(drafted[b : b + 1], q[None].float(), case.shape.gamma, p[None].float())
                for b, (p, q) in enumerate(zip(logits, draft_logits, strict=True))
            ]

        def accepted() -> float:
            return sum(float(matches) for _, matches in run()) / case.shape.B

        return Ready(run, accepted, graphable=False)


class Torch(Contender):
    """`unfused`, as it stands or compiled."""

    def __init__(self, *, compiled: bool = False) -> None:
        self._compiled = compiled
        self._function = cast(
            "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]",
            torch.compile(unfused, dynamic=True) if compiled else unfused,
        )

    def refusal(self, case: Case) -> str | None:
        if case.shape.rule is not Rule.TOKENWISE:
            return f"it does not know the rule {case.shape.rule.value}"
        if self._compiled and case.logits.device.type != "cuda":
            return "it is compiled for a GPU only"
        return None

    def start(self, case: Case) -> Ready:
        arguments = case.logits, case.draft_logits, case.drafted

        def run() -> tuple[Tensor, Tensor]:
            return self._function(*arguments)

        return Ready(run, lambda: float(run()[0].float().mean()), graphable=True)


class FlashInfer(Contender):
    """FlashInfer's softmax of both models' logits, then its `chain_speculative_sampling`."""

    def refusal(self, case: Case) -> str | None:
        if case.shape.rule is not Rule.TOKENWISE:
            return f"it does not know the rule {case.shape.rule.value}"
        if case.logits.device.type != "cuda":
            return "it needs a CUDA device"
        return None if find_spec("flashinfer") is not None else "flashinfer is not installed"

    def start(self, case: Case) -> Ready:
        sampling: Any = importlib.import_module("flashinfer.sampling")
        logits, draft_logits = case.logits, case.draft_logits
        drafted = case.drafted.to(torch.int32)

        def softmax(z: Tensor) -> Tensor:
            return cast("Tensor", sampling.softmax(z.flatten(0, 1).float())).view(z.shape)

        def run() -> Any:
            return sampling.chain_speculative_sampling(softmax(draft_logits), drafted, softmax(logits))

        def accepted() -> float:
            tokens = run()[0]  # [B, γ+1], -1 after the last
            return float((tokens >= 0).sum(dim=1).float().mean()) - 1

        return Ready(run, accepted, graphable=False)


def contenders_of(path: str) -> dict[str, Contender]:
    """All who verify, by name; `path` is Outrider's implementation."""
    return {
        "outrider": Outrider(path),
        "transformers": Transformers(),
        "torch": Torch(),
        "compiled": Torch(compiled=True),
        "flashinfer": FlashInfer(),
    }


def unfused(logits: Tensor, draft_logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """[L Alg. 1] on a batch, in as many operations as it reads, and without waiting for the host.

    Args:
        logits: `[B, γ+1, V]`.
        draft_logits: `[B, γ, V]`.
        drafted: int64 `[B, γ]`.

    Returns:
        How many are accepted, int64 `[B]`, and the next token, int64 `[B]`.
    """
    gamma = drafted.shape[1]
    p, q = torch.softmax(logits.float(), dim=-1), torch.softmax(draft_logits.float(), dim=-1)
    p_x = p[:, :gamma].gather(2, drafted[..., None])[..., 0]
    q_x = q.gather(2, drafted[..., None])[..., 0]
    stands = torch.rand_like(p_x) * q_x < p_x
    accepted = stands.long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(len(p), device=p.device)
    stopped = (accepted < gamma)[:, None]
    rest = p[row, accepted] - q[row, accepted.clamp(max=gamma - 1)] * stopped
    # The least of exponential times with these rates; `multinomial` would wait for the host.
    times = torch.empty_like(rest).exponential_()
    return accepted, (rest.clamp(min=0) / times).argmax(dim=1)
