"""The image with all that it installs, for real: it asks the package index, and takes minutes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.deploy.image_builder import PATH, Builder, Root, entry_point, installed, need_namespaces, stages
from tests.deploy.manifests import SERVICES, Deployed, composed
from tests.project.test_pins import ONLY_ON_CUDA
from tests.project.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PYTHON = "/opt/outrider/bin/python"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    """The CPU variant. torch is taken from where this machine's pip takes it: TORCH_INDEX is left empty."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("image")
    env, mounts = _pip()
    yield Builder(stages(TORCH_INDEX=""), folder, env=lambda target: dict(env), mounts=mounts).build("verifier")
    subprocess.run(["rm", "-rf", str(folder)], check=True)  # gigabytes


def _pip() -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """The configuration of pip here, as variables, and the folders that it names."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE)
    env = [(f"PIP_{name.upper().replace('-', '_')}", value) for name, value in found]
    named = {Path(path) for _, value in found for path in re.findall(r"(?:file://)?(/\S+)", value)}
    # An index may link to files that lie beside it.
    folders = {path.parent if path.name == "simple" else path for path in named if path.is_dir()}
    return env, [("ro", str(path), str(path)) for path in sorted(folders)]


def test_every_package_has_the_version_that_was_tested(root: Root) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", "\n".join(lines), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pinned.items()}
    found = {canonicalize_name(name): Version(version).public for name, version in installed(root, PYTHON).items()}
    found = {name: version for name, version in found.items() if not name.startswith((*ONLY_ON_CUDA, "outrider"))}
    assert {"torch", "grpcio", "transformers"} <= found.keys()
    assert found == {name: pins.get(name) for name in found}
    # And nothing of what only tests need (setuptools is asked for by torch).
    assert found.keys() & {"pytest", "mypy", "ruff", "hypothesis", "scipy", "pip"} == set()


@pytest.mark.parametrize("service", SERVICES)
def test_both_services_are_there(root: Root, service: str) -> None:
    command = entry_point(stages(), service)
    said = root.run([PYTHON, *command[1:], "--help"], env={"PATH": PATH})
    assert "--listen" in said


def test_the_downloader_takes_what_the_init_container_tells_it(root: Root) -> None:
    (init,) = Deployed(composed("plaintext", "hub-weights"), "draft").spec["initContainers"]
    said = root.run([f"/opt/outrider/bin/{init['command'][0]}", init["command"][1], "--help"], env={"PATH": PATH})
    for option in (word for word in init["command"] if word.startswith("--")):
        assert option in said
