"""The Dockerfile, without running it: the linter, and our own rules."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.image_builder import DOCKERFILE, Stage, in_context, stages
from tests.deploy.manifests import SERVICES
from tests.machine import absent
from tests.project.tree import PACKAGES


def _arguments(stage: Stage, name: str) -> list[str]:
    return [step.arguments() for step in stage.steps if step.name == name]


def _installed(stage: Stage) -> set[str]:
    """The packages of the distribution."""
    return {
        word
        for run in _arguments(stage, "RUN")
        if "apt-get install" in run
        for word in run.split("apt-get install")[1].partition("&&")[0].split()
        if not word.startswith("-")
    }


def test_the_linter_finds_nothing() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not linter.exists():
        absent("hadolint is not installed here (the extra `dev` has it for Linux and macOS)")
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_runs_without_root_and_build_tools(service: str, variant: str) -> None:
    found = stages(variant)
    stage = found[service]
    assert stage.entry_point() == ["python", "-m", f"{service}_service"]
    assert f"base-{variant}" in stage.bases
    assert found["dependencies"].bases[0] == f"index-{variant}"
    # A kubelet cannot resolve a name to a user id, and refuses it under runAsNonRoot.
    assert all(part.isdigit() and int(part) > 0 for part in stage.last("USER").split(":"))
    # Triton compiles a driver module at its first launch, in both services.
    compiler = {"gcc", "libc6-dev"} if variant == "cuda" else set()
    assert _installed(stage) == compiler
    # Stages that build are not below one that is shipped.
    assert {"dependencies", "package"}.isdisjoint(stage.bases)


def test_every_installation_keeps_to_the_constraints() -> None:
    runs = [run for stage in stages().values() for run in _arguments(stage, "RUN")]
    commands = [part for run in runs for part in run.split("&&") if "pip" in part and " install " in part]
    assert commands
    for command in commands:
        # A command that takes nothing from an index needs no constraint.
        assert "--constraint constraints.txt" in command or {"--no-index", "--no-deps"} <= set(command.split())


def test_the_images_have_the_extras_of_what_they_serve() -> None:
    (run,) = [run for run in _arguments(stages()["dependencies"], "RUN") if "requirements.py" in run]
    extras = run.split("requirements.py", 1)[1].split(">", 1)[0].split()
    assert set(extras) == {"service", "parallel", "http", "vllm", "audio"}  # the front takes speech


def test_the_context_holds_the_copied_files_and_no_more() -> None:
    copies = [step for stage in stages().values() for step in stage.steps if step.name == "COPY"]
    copied = {source for step in copies if not step.flags("from") for source in step.arguments().split()[:-1]}
    assert set(PACKAGES) <= copied
    assert [path for path in copied if not in_context(path)] == []
    for left in (".git", ".venv", "tests", "benchmarks", "shared", "models/train.py", "deploy/base", "kernels/c.so"):
        assert not in_context(left), left
