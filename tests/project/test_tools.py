"""Ruff, mypy and import-linter find nothing, as pyproject.toml sets them; on failure the test shows their output."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.project.tree import ROOT

_LINT_IMPORTS = str(Path(sysconfig.get_path("scripts")) / "lint-imports")


@pytest.mark.timeout(600)  # a first run of mypy reads the types of torch and numpy too
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "ruff", "check", "--no-fix", "."], id="style"),
        pytest.param(["-m", "ruff", "format", "--diff", "."], id="format"),
        pytest.param(["-m", "mypy"], id="types"),
        pytest.param([_LINT_IMPORTS, "--no-cache"], id="imports"),
    ],
)
def test_a_tool_finds_nothing(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)
