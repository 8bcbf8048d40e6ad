"""The kernels, compiled ahead of time for sm_90: nothing is spilled, and they read 128 bits at a time.

In each run supports hold 16 tokens, which compiles in a quarter of the time. With `-m slow` they hold 256, as when
serving, and all are compiled for sm_80 too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")

Kernels = list[dict[str, Any]]
WIDEST = 256
"""The largest support."""


def _compiled(cache: Path, architecture: int, support: int, *, with_plain: bool) -> Kernels:
    """Return what `tests.kernels.compiled` prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", *map(str, (architecture, support, int(with_plain)))],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return list(json.loads(run.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    cache = getattr(pytestconfig, "cache", None)  # kernels that did not change are not compiled again
    folder = cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")
    return _compiled(folder, 90, 16, with_plain=True)


def _named(compiled: Kernels, name: str) -> Kernels:
    return [each for each in compiled if each["kernel"] == name]


@pytest.mark.timeout(300)
def test_nothing_is_spilled(compiled: Kernels) -> None:
    assert all(each["instructions"] > 100 for each in compiled)
    assert [each for each in compiled if each["spills"]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [80, 90])
def test_nothing_is_spilled_with_the_largest_supports_either(tmp_path: Path, architecture: int) -> None:
    assert [each for each in _compiled(tmp_path, architecture, WIDEST, with_plain=False) if each["spills"]] == []


def test_logits_are_read_128_bits_at_a_time(compiled: Kernels) -> None:
    """A full tile of bfloat16 takes two such loads of each thread, sixteen logits."""
    stats = _named(compiled, "stats_kernel")
    assert len(stats) == 4
    assert [each for each in stats if each["wide_loads"] < 2] == []


@pytest.mark.parametrize(("with_race", "variants", "registers"), [(False, 2, 64), (True, 1, 80)])
def test_statistics_leave_registers_for_several_programs(
    compiled: Kernels, with_race: bool, variants: int, registers: int
) -> None:
    """Of 256 threads each, in 65,536 registers: four programs a multiprocessor, or three with races."""
    of_kind = {"ADJUSTED": False, "WITH_RACE": with_race}
    found = [
        each["registers"]
        for each in _named(compiled, "stats_kernel")
        if each["constants"] == each["constants"] | of_kind
    ]
    assert len(found) == variants
    assert max(found) <= registers


@pytest.mark.parametrize(
    ("name", "loads"), [("rms_norm_kernel", 2), ("gated_kernel", 2), ("rotate_and_store_kernel", 3)]
)
def test_layers_read_and_write_128_bits_at_a_time(compiled: Kernels, name: str, loads: int) -> None:
    """Eight numbers a thread in bfloat16; those in float32 (angles, norms of heads) take two loads."""
    kernels = _named(compiled, name)
    assert kernels
    for each in kernels:
        assert each["wide_loads"] >= loads + (2 if each["constants"].get("NORMED") else 0), each
        assert each["wide_stores"] == each["stores"], each


def test_heads_are_rotated_without_barriers(compiled: Kernels) -> None:
    """Numbers that are rotated together lie in one thread, and those summed in a norm in one warp."""
    assert [each["barriers"] for each in _named(compiled, "rotate_and_store_kernel")] == [0, 0]


def test_an_odd_number_of_rows_needs_no_other_compilation(compiled: Kernels) -> None:
    """Arrays of a step lie behind others of it, at any multiple of 4 or 8 bytes; no step may wait for a compiler."""
    free = {
        "rotate_and_store_kernel": ["positions", "places"],
        "attend_kernel": ["row_starts", "lengths", "tables", "items"],
        "merge_kernel": ["positions", "row_slots"],
    }
    for name, arguments in free.items():
        assert {tuple(each["of_any_alignment"]) for each in _named(compiled, name)} == {tuple(arguments)}
