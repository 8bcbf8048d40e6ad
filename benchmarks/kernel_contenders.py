"""Who verifies in `benchmarks.kernel`: Outrider, transformers' own function, plain torch, torch.compile, FlashInfer.

Each takes a case and gives work to be timed, and what it accepted. All but Outrider take the whole of q; transformers
and plain torch turn both models' logits to float32 first, as transformers' own loop does.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.utils import _speculative_sampling

from benchmarks.clocks import Work
from benchmarks.kernel_cases import Case
from kernels.verify import Rule, implementations, verify

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
        moved_bytes: what a run reads and writes, counted from its tensors; None where they cannot be seen.
    """

    run: Work
    accepted: Callable[[], float]
    graphable: bool
    moved_bytes: Callable[[], int] | None
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
        return None if case.shape.rule in rules else f"{self.path} does not judge by {case.shape.rule.value}"

    def start(self, case: Case) -> Ready:
        logits = case.logits.flatten(0, 1)

        def whole() -> Any:
            return verify(logits, case.proposals, self.path)

        def accepted() -> float:
            return sum(result.accepted for result in whole()) / case.shape.B

        if self.path != "triton":
            return Ready(whole, accepted, graphable=False, moved_bytes=lambda: traffic(whole), whole=whole)
        launch: Any = importlib.import_module("kernels.verify_triton").prepare(logits, case.proposals)
        return Ready(
            launch.run, accepted, graphable=True, moved_bytes=lambda: held_traffic(launch, logits), whole=whole
        )


class Transformers(Contender):
    """transformers' `_speculative_sampling`, a sequence at a time: it takes no batch."""

    def refusal(self, case: Case) -> str | None:
        if case.shape.rule is not Rule.TOKENWISE:
            return f"it does not judge by {case.shape.rule.value}"
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

        return Ready(run, accepted, graphable=False, moved_bytes=lambda: traffic(run))


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
            return f"it does not judge by {case.shape.rule.value}"
        if self._compiled and case.logits.device.type != "cuda":
            return "it is compiled for a GPU only"
        return None

    def start(self, case: Case) -> Ready:
        arguments = case.logits, case.draft_logits, case.drafted

        def run() -> tuple[Tensor, Tensor]:
            return self._function(*arguments)

        # What a compiled graph moves cannot be seen from its tensors.
        moved = None if self._compiled else lambda: traffic(run)
        return Ready(run, lambda: float(run()[0].float().mean()), graphable=True, moved_bytes=moved)


class FlashInfer(Contender):
    """FlashInfer's softmax of both models' logits, then its `chain_speculative_sampling`."""

    def refusal(self, case: Case) -> str | None:
        if case.shape.rule is not Rule.TOKENWISE:
            return f"it does not judge by {case.shape.rule.value}"
        if case.logits.device.type != "cuda":
            return "it needs a CUDA device"
        return None if find_spec("flashinfer") is not None else "flashinfer is not installed"

    def start(self, case: Case) -> Ready:
        sampling: Any = importlib.import_module("flashinfer.sampling")
        logits, draft_logits = case.logits, case.draft_logits
        drafted = case.drafted.to(torch.int32)

        def law(z: Tensor) -> Tensor:
            return cast("Tensor", sampling.softmax(z.flatten(0, 1).float())).view(z.shape)

        def run() -> Any:
            return sampling.chain_speculative_sampling(law(draft_logits), drafted, law(logits))

        def accepted() -> float:
            tokens = run()[0]  # [B, γ+1], -1 after the last
            return float((tokens >= 0).sum(dim=1).float().mean()) - 1

        return Ready(run, accepted, graphable=False, moved_bytes=None)


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


# -------------------------------------------------------------------------------------------------------------- traffic


class _Traffic(TorchDispatchMode):
    """Adds up what each operation of torch reads and writes."""

    # These read what they are asked for, not all of what they are given.
    _SELECTING = (torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.index_select)
    _IDLE = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.detach, torch.ops.aten._reshape_alias)

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if func.is_view or packet in self._IDLE:
            return result
        written = sum(map(_size, _tensors(result)))
        given = list(_tensors((args, kwargs)))
        self.bytes += written + (
            written + sum(map(_size, given[1:])) if packet in self._SELECTING else sum(map(_size, given))
        )
        return result


def traffic(work: Work) -> int:
    """Bytes that `work` moves, were each of torch's operations to read its tensors and write its results once."""
    with _Traffic() as counted:
        work()
    return counted.bytes


def held_traffic(launch: Any, logits: Tensor) -> int:
    """Bytes that a launch moves: the logits once, and once in and once out whatever else it holds.

    The tile that a draw reads again is left out: less than a hundredth.
    """
    held = {id(each): each for each in _tensors(launch)}
    others = sum(_size(each) for each in held.values() if each.data_ptr() != logits.data_ptr())
    return _size(logits) + 2 * others


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> Any:
    """All tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
