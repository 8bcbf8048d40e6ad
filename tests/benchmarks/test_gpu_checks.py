"""The checks before a GPU is measured: each test marked gpu has its group, and what fails is told with its words."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_checks
from benchmarks.clocks import CpuClock
from benchmarks.contenders import Unavailable
from benchmarks.gpu_bench import DRY, GpuBench
from benchmarks.gpu_checks import GROUPS, memcheck
from benchmarks.gpu_report import _memcheck
from tests.project.tree import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    made = GpuBench(replace(DRY, is_dry=False), CPU, CpuClock(CPU, 5), tmp_path, lambda line: None)
    made.begin(60.0)
    yield made
    made.close_services()


def test_every_test_marked_gpu_has_a_group() -> None:
    marked = re.compile(r"pytest\.mark\.gpu|^from tests\.kernels\.paths import .*(PATHS|TRITON)", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if marked.search(path.read_text(encoding="utf-8")) and path.name != Path(__file__).name
    }
    named = [file for files in GROUPS.values() for file in files]
    assert sorted(named) == sorted(found)


def test_groups_end_with_the_first_in_which_a_test_fails(
    bench: GpuBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("good", "assert True"), ("bad", "assert 2 + 2 == 5"), ("later", "assert True")):
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n@pytest.mark.gpu\ndef test_{name}(): {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    files = {name: (str(tmp_path / f"test_{name}.py"),) for name in ("good", "bad", "later")}
    monkeypatch.setattr(gpu_checks, "GROUPS", files)
    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)
    found = gpu_checks.tests(bench)
    assert list(found["groups"]) == ["good", "bad"]
    assert found["groups"]["good"]["exit_code"] == 0
    assert found["groups"]["good"]["outcome"].startswith("1 passed")
    assert any("assert (2 + 2) == 5" in line for line in found["groups"]["bad"]["output"])
    assert bench.troubles == [
        f"tests of bad: {found['groups']['bad']['outcome']}; the groups after it did not run",
    ]


def test_a_group_that_takes_too_long_takes_no_other_with_it(
    bench: GpuBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_good.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_good(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(gpu_checks, "GROUPS", {"good": (str(tmp_path / "test_good.py"),), "slow": ("test_slow.py",)})
    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)
    run = gpu_checks._run

    def late(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[int, list[str]]:
        return run(command, 0.0 if "test_slow.py" in command else seconds, environment)

    (tmp_path / "test_slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_checks, "_run", late)
    assert list(gpu_checks.tests(bench)["groups"]) == ["good"]
    (trouble,) = bench.troubles
    assert trouble.startswith("tests of slow: ")
    assert "took more than 0 s" in trouble


def test_a_memcheck_that_cannot_run_is_told_on_the_page() -> None:
    assert "Not checked: Device not supported." in _memcheck({"error": "Device not supported"})
    assert "no error" in _memcheck({"tool": gpu_checks.SANITIZER, "exit_code": 0})


SANITIZER = """#!{python}
import os, subprocess, sys
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
assert sys.argv[1:5] == ["--tool", "memcheck", "--error-exitcode", "9"]
print("========= COMPUTE-SANITIZER")
{then}
"""


@pytest.mark.parametrize(
    ("then", "troubles"),
    [
        ("sys.exit(0)", []),
        (
            "print('========= Invalid __global__ read of size 2 bytes'); sys.exit(9)",
            ["exit code 9: ========= COMPUTE-SANITIZER"],
        ),
    ],
)
def test_what_the_sanitizer_finds_is_told(
    then: str, troubles: list[str], bench: GpuBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / gpu_checks.SANITIZER
    tool.write_text(SANITIZER.format(python=sys.executable, then=then))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    found = memcheck(bench)
    assert found["tool"] == gpu_checks.SANITIZER
    assert bench.troubles == troubles
    assert found.get("output", ["", "Invalid"])[1].find("Invalid") >= 0


def test_a_device_that_the_sanitizer_does_not_know_is_none_of_our_faults(
    bench: GpuBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / gpu_checks.SANITIZER
    tool.write_text(
        SANITIZER.format(python=sys.executable, then="print('========= Device not supported'); sys.exit(1)")
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(Unavailable, match="Device not supported"):
        memcheck(bench)


def test_a_check_that_takes_too_long_is_ended(bench: GpuBench) -> None:
    with pytest.raises(Unavailable, match="took more than"):
        gpu_checks._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.0)
