"""What a GPU machine lacks is named, with a command that brings just that; wheels that are there are installed."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_packages
from benchmarks.gpu_packages import DEVICE, TESTS, UNUSED, download, missing, pins, required


def test_here_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_packages.main(["--wheels", "/nowhere"]) == 0
    assert capsys.readouterr().out == "packages: all there\n"


def test_each_requirement_is_one_of_ours_and_has_a_version() -> None:
    names = {each.name for each in required()}
    assert names >= {"grpcio", "structlog", "pydantic", "matplotlib", "pytest-asyncio", *DEVICE, *TESTS}
    assert not names & UNUSED
    assert names - DEVICE <= pins().keys()


def test_what_is_missing_or_too_old_is_told_from_what_is_there() -> None:
    asked = [Requirement(line) for line in ("pytest>=1", "rich>=1000", "no-such-package>=1", "torch==0.1")]
    found = missing(asked)
    assert found.keys() == {"rich", "no-such-package"}
    assert found["no-such-package"] == "not installed"
    assert re.fullmatch(r"\d[\d.]* is installed, >=1000 is needed", found["rich"])


def test_the_command_names_versions_platforms_and_this_python() -> None:
    line = download(["structlog", "grpcio"], {"structlog": "26.1.0", "grpcio": "1.85.1"}, "wheels")
    assert line.endswith("--dest wheels grpcio==1.85.1 structlog==26.1.0")
    assert f"--python-version {sys.version_info.major}.{sys.version_info.minor} " in line
    assert "--platform manylinux_2_28_" in line
    assert "--only-binary=:all:" in line


def test_a_lack_ends_with_the_command_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = {"structlog": "not installed", "triton": "not installed"}
    monkeypatch.setattr(gpu_packages, "missing", lambda requirements: lacking)
    assert gpu_packages.main(["--wheels", "/nowhere"]) == 2
    told = capsys.readouterr().err
    assert "packages: structlog: not installed" in told
    assert "Take a Python that has triton for this GPU: make gpu PYTHON=..." in told
    assert f"structlog=={pins()['structlog']}\n" in told
    assert "triton==" not in told


def test_wheels_are_installed_beside_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = "outrider_lends-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "outrider_lends-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("outrider_lends.py", "NUMBER = 7\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: outrider-lends\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(gpu_packages, "required", lambda: [Requirement("outrider-lends>=1")])
    monkeypatch.setattr(gpu_packages, "pins", lambda: {"outrider-lends": "1.0"})
    assert gpu_packages.main(["--wheels", "/nowhere"]) == 2
    assert gpu_packages.main(["--wheels", str(tmp_path), "--target", str(tmp_path / "to")]) == 0
    assert (tmp_path / "to" / "outrider_lends.py").is_file()
    assert f"packages: all there (1 from {tmp_path})" in capsys.readouterr().out

    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    assert gpu_packages.main(["--wheels", str(tmp_path), "--target", str(tmp_path / "to")]) == 2
    assert "pip could not install the wheels" in capsys.readouterr().err


def test_make_looks_for_packages_and_then_takes_one_run() -> None:
    told = subprocess.run(
        ["make", "--dry-run", "gpu", "PART=2", "PYTHON=python-of-the-gpu", "WHEELS=there"],
        cwd=gpu_packages.ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    packages, run = " ".join(told.split()).split("PYTHONPATH=build/gpu")
    assert packages.strip() == "python-of-the-gpu -m benchmarks.gpu_packages --wheels there --target build/gpu"
    assert " ".join(run.replace("\\", " ").split()) == "python-of-the-gpu -m benchmarks.gpu --run 2"
