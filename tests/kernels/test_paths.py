"""Which implementation judges is chosen once, and one that cannot run is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.paths import PathUnavailable, choose, obstacle, rehearse, warm_up
from kernels.verify import implementation_for, implementations
from tests.kernels.cases import random_batch
from tests.kernels.paths import IS_INTERPRETED, PATHS

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
ALL = ("reference", "torch", "triton")


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_auto_is_what_verify_picks_by_itself(device: torch.device) -> None:
    chosen = choose("auto", device)
    assert chosen.name == implementation_for(device)
    assert device.type in chosen.reason


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_runs_anywhere_may_be_asked_for_anywhere(name: str, device: torch.device) -> None:
    assert choose(name, device).name == name
    assert choose(name, device).reason == "asked for"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PathUnavailable, match=r"^triton cannot judge on cpu: it needs a CUDA device, or TRITON_INT"):
        choose("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    assert obstacle("triton", CPU, ALL) is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_where_their_operands_lie() -> None:
    rehearse("triton", CUDA)
    assert torch.cuda.current_device() == 0


def test_triton_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.paths.find_spec", lambda name: None)
    assert obstacle("triton", CUDA, ALL) == "triton is not installed"
    assert obstacle("torch", CUDA, ALL) is None


def test_what_a_build_does_not_have_is_refused() -> None:
    assert obstacle("reference", CPU, ("torch",)) == "this build has torch"
    with pytest.raises(PathUnavailable, match=f"^nonsense cannot judge on cpu: this build has {implementations()[0]}"):
        choose("nonsense", CPU)


@pytest.mark.parametrize("path", PATHS)
def test_a_rehearsal_and_a_warm_up_pass_where_the_path_runs(path: str) -> None:
    device = torch.device("cuda") if path == "triton" and not IS_INTERPRETED else CPU
    rehearse(path, device)
    warm_up(path, device, torch.bfloat16, 300, 304)


class Launches:
    """Stands for a kernel, and takes down what Triton would compile anew for: constants, types, alignment."""

    run = True

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            kinds = tuple(
                (each.dtype, each.data_ptr() % 16) if isinstance(each, Tensor) else (each == 1, each % 16)
                for each in arguments
            )
            self._seen.add((self._kernel.__name__, kinds, tuple(sorted(constants.items()))))
            if self.run:
                self._kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.skipif(not IS_INTERPRETED, reason="looks at what the interpreter is given")
def test_after_the_warm_up_no_proposal_asks_for_another_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that waited for a compiler would hold up every stream for seconds."""
    from kernels import verify_triton

    seen: set[Any] = set()
    for name in ("stats_kernel", "filter_kernel", "verify_kernel"):
        monkeypatch.setattr(verify_triton, name, Launches(getattr(verify_triton, name), seen))
    V, width = 300, 304
    warm_up("triton", CPU, torch.bfloat16, V, width)
    compiled = set(seen)
    assert len({each[0] for each in compiled}) == 3
    monkeypatch.setattr(Launches, "run", False)
    for seed in range(100):
        logits, proposals = random_batch(seed, V, 1 + seed % 3, torch.bfloat16)
        wide = torch.zeros(len(logits), width, dtype=torch.bfloat16)
        wide[:, :V] = logits
        verify_triton.prepare(wide[:, :V], proposals).run()
        assert seen == compiled, seed


def test_a_rehearsal_tells_what_went_wrong() -> None:
    with pytest.raises(
        PathUnavailable, match=r"^nonsense cannot judge on cpu: ValueError: implementation is 'nonsense'"
    ):
        rehearse("nonsense", CPU)
