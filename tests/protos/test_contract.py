"""The contract: its generated code is fresh, its style holds, and it breaks no earlier client."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protos import generate
from protos.outrider.v1 import draft_service_pb2, verifier_service_pb2

ROOT = Path(__file__).resolve().parents[2]


def _buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    executable = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert executable, "buf is not installed: it comes with the dev extra"
    return subprocess.run([executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    fresh = generate.generate(tmp_path)
    committed = ROOT / "protos" / "outrider" / "v1"
    assert {path.name for path in fresh} == {path.name for path in committed.iterdir() if "_pb2" in path.name}
    stale = [path.name for path in fresh if path.read_text() != (committed / path.name).read_text()]
    assert not stale, f"run `make protos`: {stale}"


def test_style_holds() -> None:
    result = _buf("lint")
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_earlier_client_breaks() -> None:
    result = _buf("breaking", "protos", "--against", "protos/v1.binpb")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_breaking_change_is_noticed(tmp_path: Path) -> None:
    changed = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", changed, ignore=shutil.ignore_patterns("*.py", "*.pyi", "__pycache__"))
    speculation = changed / "outrider" / "v1" / "speculation.proto"
    before = speculation.read_text()
    speculation.write_text(before.replace("uint32 base_length = 2;", "uint64 base_length = 2;"))
    assert speculation.read_text() != before
    result = _buf("breaking", str(changed), "--against", "protos/v1.binpb")
    assert result.returncode != 0
    assert "base_length" in result.stdout + result.stderr


@pytest.mark.parametrize("module", [draft_service_pb2, verifier_service_pb2])
def test_descriptors_keep_the_path_other_languages_use(module: object) -> None:
    assert module.DESCRIPTOR.name.startswith("outrider/v1/")  # type: ignore[attr-defined]
