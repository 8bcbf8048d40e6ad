"""The kernels, compiled ahead of time for sm_90: nothing is spilled, and they read 128 bits at a time.

In each run the result takes supports of 16 tokens, which compiles in a quarter of the time. With `-m slow` it takes
256, as it does when it serves, and all are compiled for sm_80 too.
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

WIDEST = 256
"""The largest support."""


def _compiled(cache: Path, architecture: int, support: int, *, with_plain: bool) -> list[dict[str, Any]]:
    """What `tests.kernels.compiled` prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", *map(str, (architecture, support, int(with_plain)))],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return list(json.loads(run.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _compiled(tmp_path_factory.mktemp("triton"), 90, 16, with_plain=True)


@pytest.mark.timeout(300)
def test_nothing_is_spilled(compiled: list[dict[str, Any]]) -> None:
    assert all(each["instructions"] > 100 for each in compiled)
    assert [each for each in compiled if each["spills"]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [80, 90])
def test_nothing_is_spilled_with_the_largest_supports_either(tmp_path: Path, architecture: int) -> None:
    assert [each for each in _compiled(tmp_path, architecture, WIDEST, with_plain=False) if each["spills"]] == []


def test_logits_are_read_128_bits_at_a_time(compiled: list[dict[str, Any]]) -> None:
    """A full tile of bfloat16 takes two such loads of each thread, sixteen logits."""
    stats = [each for each in compiled if each["kernel"] == "stats_kernel"]
    assert len(stats) == 4
    assert [each for each in stats if each["wide_loads"] < 2] == []


def test_the_statistics_leave_room_for_four_programs_on_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    """Of 256 threads each, in 65,536 registers: 64 a thread at most, where no changes and races are compiled in."""
    stats = [each for each in compiled if each["kernel"] == "stats_kernel"]
    plain = [each for each in stats if not (each["constants"]["ADJUSTED"] or each["constants"]["WITH_RACE"])]
    assert len(plain) == 2
    assert max(each["registers"] for each in plain) <= 64


def test_races_leave_room_for_three(compiled: list[dict[str, Any]]) -> None:
    """80 registers a thread at most, in a launch that may be captured and has no changes."""
    (races,) = [
        each
        for each in compiled
        if each["kernel"] == "stats_kernel" and each["constants"]["WITH_RACE"] and not each["constants"]["ADJUSTED"]
    ]
    assert races["registers"] <= 80


def test_what_lies_between_products_is_read_and_written_128_bits_at_a_time(compiled: list[dict[str, Any]]) -> None:
    """Eight numbers a thread in bfloat16; those in float32 (angles, norms of heads) take two loads."""
    loads = {"rms_norm_kernel": 2, "gated_kernel": 2, "rotate_and_store_kernel": 3}
    between = [each for each in compiled if each["kernel"] in loads]
    assert {each["kernel"] for each in between} == loads.keys()
    for each in between:
        wanted = loads[each["kernel"]] + (2 if each["constants"].get("NORMED") else 0)
        assert each["wide_loads"] >= wanted, each
        assert each["wide_stores"] == each["stores"], each


def test_heads_are_rotated_without_waiting_for_other_threads(compiled: list[dict[str, Any]]) -> None:
    """What is rotated together, and summed in a norm, lies in one thread and in one warp: no barrier."""
    rotations = [each for each in compiled if each["kernel"] == "rotate_and_store_kernel"]
    assert len(rotations) == 2
    assert [each for each in rotations if each["barriers"]] == []


def test_an_odd_number_of_rows_asks_for_no_other_compilation(compiled: list[dict[str, Any]]) -> None:
    """Arrays of a pass lie behind others of it, at any multiple of 4 or 8 bytes; no pass may wait for a compiler."""
    rotations = [each for each in compiled if each["kernel"] == "rotate_and_store_kernel"]
    assert [each["of_any_alignment"] for each in rotations] == [["positions", "places"]] * 2
    free = {each["kernel"]: each["of_any_alignment"] for each in compiled}
    assert free["attend_kernel"] == ["row_starts", "lengths", "tables", "items"]
    assert free["merge_kernel"] == ["positions", "row_slots"]
