"""Which packages a machine with a GPU lacks for `make gpu`, and the command that brings them as wheels.

    python -m benchmarks.gpu_packages --wheels wheels --target build/gpu

Such a machine has a torch of its own, and often reaches no package index. Wheels in the first folder are installed into
the second, which `make gpu` puts on the path. What is missing then is named, with the `pip download` to run where there
is an index. It imports nothing of ours, and nothing but what comes with transformers.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

# The machine's own: they must fit its driver.
DEVICE = frozenset({"torch", "triton", "transformers"})
# What the benchmark and the tests marked gpu never import.
UNUSED = frozenset({"opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-sdk", "uvloop"})
# Of the tools for tests.
TESTS = frozenset({"hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "scipy"})

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def required(project: Path = ROOT / "pyproject.toml") -> list[Requirement]:
    """What the whole run needs: the project's own requirements for services, benchmarks and tests."""
    told = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras = told["optional-dependencies"]
    lines = [*told["dependencies"], *extras["service"], *extras["bench"]]
    wanted = [Requirement(line) for line in [*lines, "triton"]]
    tests = [each for each in map(Requirement, extras["dev"]) if each.name in TESTS]
    return [each for each in [*wanted, *tests] if each.name not in UNUSED]


def missing(requirements: Iterable[Requirement]) -> dict[str, str]:
    """What does not meet its requirement here, and how: of the machine's own packages only whether they are there."""
    found = {}
    for each in requirements:
        try:
            present = version(each.name)
        except PackageNotFoundError:
            found[each.name] = "not installed"
            continue
        if each.name not in DEVICE and not each.specifier.contains(present, prereleases=True):
            found[each.name] = f"{present} is installed, {each.specifier} is needed"
    return found


def pins(constraints: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """The versions that we test with, by canonical name."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in pinned}


def download(names: Iterable[str], pinned: Mapping[str, str], folder: str) -> str:
    """The command that fetches the wheels for this Python and machine, with what they need themselves."""
    machine, numbers = platform.machine(), f"{sys.version_info.major}.{sys.version_info.minor}"
    platforms = " ".join(f"--platform {each}_{machine}" for each in PLATFORMS)
    wanted = " ".join(f"{name}=={pinned[canonicalize_name(name)]}" for name in sorted(names))
    return (
        f"python3 -m pip download --only-binary=:all: --python-version {numbers} --implementation cp {platforms} "
        f"--constraint constraints.txt --dest {folder} {wanted}"
    )


def install(wheels: Sequence[Path], target: Path) -> None:
    """Installs wheels into a folder, and puts it on this process's path.

    Raises:
        subprocess.CalledProcessError: pip could not; it has said why.
    """
    how = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--upgrade")
    command = [sys.executable, "-m", "pip", "install", *how, "--target", str(target), *map(str, wheels)]
    subprocess.run(command, check=True)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 where everything is there, and 2 where something is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_packages", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="folder to look in (default: %(default)s)")
    parser.add_argument("--target", type=Path, default=Path("build/gpu"), help="folder to install into")
    given = parser.parse_args(arguments)
    wheels = sorted(given.wheels.glob("*.whl"))
    if wheels:
        try:
            install(wheels, given.target)
        except subprocess.CalledProcessError as error:
            print(f"pip could not install the wheels of {given.wheels} (exit code {error.returncode})", file=sys.stderr)
            return 2
    lacking = missing(required())
    if not lacking:
        print(f"packages: all there ({len(wheels)} from {given.wheels})" if wheels else "packages: all there")
        return 0
    for name, why in lacking.items():
        print(f"packages: {name}: {why}", file=sys.stderr)
    if own := DEVICE & lacking.keys():
        print(f"Take a Python that has {', '.join(sorted(own))} for this GPU: make gpu PYTHON=...", file=sys.stderr)
    if others := lacking.keys() - DEVICE:
        print(f"Run this where there is a package index, and bring the folder {given.wheels} here:\n", file=sys.stderr)
        print(download(others, pins(), str(given.wheels)), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
