"""The Dockerfile, without running it: the linter, and our own rules."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.image_builder import DOCKERFILE, entry_point, in_context, lineage, stages, steps
from tests.deploy.manifests import SERVICES
from tests.machine import absent
from tests.project.tree import PACKAGES

# What compiles; what installs is taken out by the file itself.
BUILD_TOOLS = ("gcc", "g++", "clang", "make", "cmake", "build-essential", "-dev", "git", "curl", "nvcc")


def _installs(target: str, variant: str) -> set[str]:
    """Packages of the distribution that a target keeps."""
    runs = [step.rest() for step in steps(stages(variant), target, "RUN")]
    words = [word for run in runs if "apt-get install" in run for word in run.split("apt-get install")[1].split()]
    return {word for word in words[: words.index("&&")] if not word.startswith("-")} if words else set()


def test_the_linter_finds_nothing() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not linter.exists():
        absent("hadolint is not installed here (the extra `dev` has it for Linux and macOS)")
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_a_target_that_runs_as_no_root_and_has_no_build_tools(service: str, variant: str) -> None:
    found = stages(variant)
    names = {stage.name for stage in lineage(found, service)}
    assert entry_point(found, service) == ["python", "-m", f"{service}_service"]
    assert f"{service}-{variant}" in names
    assert found["dependencies"].base == f"index-{variant}"
    # A kubelet cannot tell what a name stands for, and refuses it under runAsNonRoot.
    assert all(part.isdigit() and int(part) > 0 for part in steps(found, service, "USER")[-1].text.split(":"))
    kept = {name for name in _installs(service, variant) if name.startswith(BUILD_TOOLS) or name.endswith("-dev")}
    # Triton compiles a driver module at its first launch.
    assert kept == ({"gcc", "libc6-dev"} if (service, variant) == ("verifier", "cuda") else set())
    # What was built comes from other stages: none that builds is below one that is shipped.
    assert names & {"dependencies", "package"} == set()


def test_every_installation_keeps_to_the_constraints() -> None:
    runs = [step.rest() for stage in stages().values() for step in stage.steps if step.name == "RUN"]
    commands = [part for run in runs for part in run.split("&&") if "pip" in part and " install " in part]
    assert commands
    for command in commands:
        # What takes nothing from an index needs no constraint.
        assert "--constraint constraints.txt" in command or {"--no-index", "--no-deps"} <= set(command.split())


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    copies = [step for stage in stages().values() for step in stage.steps if step.name == "COPY"]
    copied = {source for step in copies if not step.flags("from") for source in step.rest().split()[:-1]}
    assert set(PACKAGES) <= copied
    assert [path for path in copied if not in_context(path)] == []
    for left in (".git", ".venv", "tests", "benchmarks", "shared", "models/train.py", "deploy/base"):
        assert not in_context(left), left
