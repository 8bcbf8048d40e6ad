"""A wheel holds the five packages whole and nothing beside them; without an extra it brings no tensors along."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.project.tree import PACKAGES, ROOT, closure, pyproject, sources

_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
_SHIPPED = (".py", ".pyi", ".proto", "py.typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build a wheel from a copy of the tree's sources, tests included, with the back end that pip would call.

    It compiles no library that the installation has built since its sources were changed.
    """
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for path in [
        *sources(*_SHIPPED, ".c", ".h"),
        *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")),
    ]:
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    libraries = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "kernels"
    libraries.mkdir(parents=True)
    changed = max(path.stat().st_mtime for path in sources(".c", ".h", under="kernels"))
    for path in (ROOT / "kernels").glob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
        if path.stat().st_mtime > changed:
            shutil.copy2(path, libraries)
    manifest = tree / "pyproject.toml"
    manifest.write_text(manifest.read_text().replace('"-O3"', '"-O0"'))  # takes a third of the time
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(built)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def _read(wheel: zipfile.ZipFile, name: str) -> str:
    (found,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(found).decode()


def test_a_wheel_holds_the_packages_whole_and_nothing_beside_them(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {Path(name).parts[0] for name in names} == set(PACKAGES)
    for package in PACKAGES:
        ours = {path.relative_to(ROOT).as_posix() for path in sources(*_SHIPPED, under=package)}
        assert ours - names == set()
        assert f"{package}/py.typed" in ours
    if shutil.which("gcc"):
        for library in ("_cpu_avx512", "_cpu_avx2", "_cpu_any"):
            assert any(name.startswith(f"kernels/{library}.") for name in names)


def test_a_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    scripts = ConfigParser()
    scripts.read_string(_read(wheel, "entry_points.txt"))
    assert scripts["console_scripts"]["outrider"] == "outrider.cli:main"
    assert "Apache License" in _read(wheel, "licenses/LICENSE")


def test_a_client_installs_no_tensors(wheel: zipfile.ZipFile) -> None:
    about = HeaderParser().parsestr(_read(wheel, "METADATA"))
    assert about["Version"] == pyproject()["project"]["version"]
    stated = [Requirement(line) for line in about.get_all("Requires-Dist", [])]
    for_clients = closure(stated)
    assert {"grpcio", "protobuf", "rich", "click"} <= for_clients
    assert for_clients.isdisjoint({"torch", "triton", "numpy", "transformers", "tokenizers", "safetensors"})
    assert "torch" in {r.name for r in stated if r.marker and r.marker.evaluate({"extra": "service"})}
