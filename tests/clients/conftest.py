"""Programs that users point at an OpenAI-compatible server, in the environment that `make clients` makes."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.cli.processes import Pair
from tests.cluster import MODELS
from tests.outrider.http.conftest import running_front
from tests.project.tree import ROOT

PROGRAMS = Path(os.environ.get("OUTRIDER_TEST_CLIENTS", ROOT / "build" / "clients")) / "bin"

Program = Callable[..., str]


@pytest.fixture(scope="package")
def front(demo_pair: Pair) -> Iterator[str]:
    """The URL of a front of the demo pair in float32."""
    with running_front(demo_pair.draft.address) as url:
        yield url


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run a program in an empty folder; return its output. Its test is skipped where the program is missing."""

    def run(name: str, *arguments: str) -> str:
        path = PROGRAMS / name
        if not path.exists():
            pytest.skip(f"{path} is missing: run `make clients`")
        cached = tmp_path / "hub" / "hub" / "models--demo--target"  # as a download leaves it
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40, encoding="utf-8")
        (cached / "snapshots").mkdir()
        (cached / "snapshots" / ("0" * 40)).symlink_to(MODELS / "target")
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(
            [path, *arguments],
            cwd=tmp_path,
            env={**os.environ, **offline, "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    return run
