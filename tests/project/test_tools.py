"""Ruff, mypy and import-linter find nothing, as pyproject.toml sets them; on failure the test shows what they said."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.project.tree import ROOT

_SCRIPTS = Path(sysconfig.get_path("scripts"))


def _finds_nothing(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}", pytrace=False)


def test_style() -> None:
    _finds_nothing(sys.executable, "-m", "ruff", "check", "--no-fix", ".")


def test_format() -> None:
    _finds_nothing(sys.executable, "-m", "ruff", "format", "--diff", ".")


@pytest.mark.timeout(600)  # a first run reads the types of torch and numpy too
def test_types() -> None:
    _finds_nothing(sys.executable, "-m", "mypy")


def test_who_may_import_whom() -> None:
    _finds_nothing(sys.executable, str(_SCRIPTS / "lint-imports"), "--no-cache")
