"""Triton's statistics of rows: bounds of the noise, and the kernels that are compiled before the first request."""

from itertools import combinations
from typing import Any

import pytest
import torch

from kernels.verify_pack import GREEDY_NUMBER, RULE_NUMBERS
from kernels.verify_path import warm_up
from tests.kernels.paths import DEVICE, TRITON

triton = pytest.importorskip("triton", reason="triton has no build for this platform")
tl = triton.language

from kernels import verify_triton  # noqa: E402
from kernels.triton_rows import exponentials, most_noise, noise_keys  # noqa: E402

pytestmark = TRITON.marks


@triton.jit
def noise_kernel(seed, bounds, exact):  # type: ignore[no-untyped-def]
    ids = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    keys = noise_keys(seed, ids * 0 + 7)
    tl.store(bounds + ids, most_noise(keys, ids))
    tl.store(exact + ids, -tl.log2(exponentials(keys, ids)))


@pytest.mark.parametrize("seed", [0, 3])
def test_no_noise_is_above_its_bound(seed: int) -> None:
    """Nor far below it where it is large: v is 2^k (1 + f), whose log2 is at most 0.0861 above k + f."""
    bounds, exact = (torch.empty(65536, device=DEVICE) for _ in range(2))
    noise_kernel[(64,)](seed, bounds, exact)
    above = (bounds - exact).cpu()
    assert above.min() > -1e-5
    assert above[exact.cpu() > 10].max() < 0.0872


def test_warm_up_compiles_the_statistics_of_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, launched = verify_triton.stats_kernel, set[tuple[Any, ...]]()

    class Observed:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                launched.add((constants["ADJUSTED"], *(constants[name] for name in verify_triton.stats_sizes(()))))
                kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(verify_triton, "stats_kernel", Observed())
    warm_up("triton", torch.device(DEVICE), torch.bfloat16, 300, 304)
    numbers = (*RULE_NUMBERS.values(), GREEDY_NUMBER)
    batches = [rules for n in range(1, len(numbers) + 1) for rules in combinations(numbers, n)]
    sizes = {tuple(verify_triton.stats_sizes(rules).values()) for rules in batches}
    assert launched == {(adjusted, *each) for adjusted in (False, True) for each in sizes}
    assert len(sizes) == 3
