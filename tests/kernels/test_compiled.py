"""The kernels, compiled ahead of time for sm_90: nothing is spilled, and they read 128 bits at a time.

In each run as most requests launch them. With `-m slow` all variants, for sm_80 too.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")

WIDE_LOADS = {"stats_kernel": 2, "rms_norm_kernel": 2, "gated_kernel": 2, "rotate_and_store_kernel": 3}
"""Eight numbers a thread in bfloat16, 16 in `stats_kernel`; float32 (angles, norms of heads) takes two loads."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("architecture", "variants"),
    [(90, ["--common"]), *(pytest.param(architecture, [], marks=pytest.mark.slow) for architecture in (80, 90))],
)
def test_kernels_spill_nothing_and_take_128_bits_at_a_time(
    architecture: int, variants: list[str], tmp_path: Path
) -> None:
    # Triton's own cache, by the hash of each source: kernels that did not change are not compiled again.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = tmp_path / "compiled.json"
    command = ["benchmarks.compiled", "--architecture", str(architecture), "--output", str(output), *variants]
    run = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = json.loads(output.read_text())["rows"]
    assert {each["kernel"] for each in compiled} > set(WIDE_LOADS)
    assert [each for each in compiled if each["spills"] or each["instructions"] <= 50] == []
    for each in compiled:
        name = each["kernel"]
        is_normed = name == "rotate_and_store_kernel" and each["constants"]["NORMED"]
        assert each["wide_loads"] >= WIDE_LOADS.get(name, 0) + 2 * bool(is_normed), each
        if name in WIDE_LOADS and name != "stats_kernel":
            assert each["wide_stores"] == each["stores"], each
        if name in ("stats_kernel", "filter_kernel"):  # a warp needs none
            assert each["barriers"] <= 3, each
