"""Programs that users point at an OpenAI-compatible server, in the environment that `make clients` makes.

Their commands are those of docs/how-to/evaluate.md, with smaller sizes.
"""

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.cli.processes import Pair
from tests.cluster import MODELS, Cluster, wait_healthy
from tests.docs.pages import BY_CLIENTS, blocks
from tests.outrider.http.conftest import running_front
from tests.project.tree import ROOT

PROGRAMS = Path(os.environ.get("OUTRIDER_TEST_CLIENTS", ROOT / "build" / "clients")) / "bin"

PAGE = ROOT / "docs" / "how-to" / "evaluate.md"

Program = Callable[..., str]


def on_page(name: str) -> list[str]:
    """The words of the page's command for a program."""
    texts = [block.text.replace("\\\n", " ") for block in blocks(PAGE, "sh") if block.reason == BY_CLIENTS]
    commands = [shlex.split(text) for text in texts]
    (found,) = [command for command in commands if command[0] == name]
    return found


def command(name: str, front: str, **changes: str) -> list[str]:
    """The page's command for a program, with this front, and with other values: each has to be there once."""
    text = shlex.join(on_page(name))
    for old, new in {"http://127.0.0.1:8000": front, **changes}.items():
        assert text.count(old) == 1, f"{old} in {text}"
        text = text.replace(old, new)
    return shlex.split(text)


@pytest.fixture(scope="package")
def front(demo_pair: Pair) -> Iterator[str]:
    """The URL of a front of the demo pair in float32, which drafts in every text, and more than is accepted."""
    with Cluster() as cluster:
        draft = cluster.draft(demo_pair.verifier, flags="--speculation fixed --gamma 12")
        wait_healthy(draft)
        with running_front(draft.address) as url:
            yield url


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run a program in a folder with the models; return its output. Without the program its test is skipped."""

    def run(name: str, *arguments: str) -> str:
        path = PROGRAMS / name
        if not path.exists():
            pytest.skip(f"{path} is missing: run `make clients`")
        cached = tmp_path / "hub" / "hub" / "models--demo--target"  # as a download leaves it
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40, encoding="utf-8")
        (cached / "snapshots").mkdir()
        (cached / "snapshots" / ("0" * 40)).symlink_to(MODELS / "target")
        (tmp_path / "models").symlink_to(ROOT / "models")
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
