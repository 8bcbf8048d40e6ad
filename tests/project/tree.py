"""The project's sources, its requirements, and their dependencies."""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("outrider", "protos", "kernels", "draft_service", "verifier_service")
"""The packages in a wheel."""

_BUILT = {"build", "dist", "__pycache__"}


@cache
def pyproject() -> Mapping[str, Any]:
    """Return the project file, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def sources(*suffixes: str, under: str = ".") -> Iterator[Path]:
    """Yield the tree's files with one of `suffixes`, in order, past environments, builds and hidden folders."""
    for folder, folders, files in os.walk(ROOT / under):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _BUILT and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(files) if name.endswith(suffixes))


def is_generated(path: Path) -> bool:
    """Say whether a tool wrote the file: such files obey that tool and no rule of ours."""
    return path.name.endswith(("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"))


def requirements(*extras: str) -> list[Requirement]:
    """Return the project's own requirements, with those of the extras."""
    project = pyproject()["project"]
    optional = project["optional-dependencies"]
    return [
        Requirement(line) for lines in (project["dependencies"], *map(optional.__getitem__, extras)) for line in lines
    ]


def every_extra() -> list[str]:
    """Return the names of all extras."""
    return list(pyproject()["project"]["optional-dependencies"])


def brought_by(distribution: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Return the requirements of an installed distribution on this machine, with those of its extras."""
    found = [Requirement(line) for line in metadata.requires(distribution) or []]
    contexts = [{"extra": extra} for extra in ("", *extras)]
    return [r for r in found if r.marker is None or any(r.marker.evaluate(context) for context in contexts)]


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """Return the names of all distributions that installing `wanted` brings to this machine.

    Raises:
        metadata.PackageNotFoundError: One of them is not installed here, so its dependencies are unknown.
    """
    names: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            names.add(name)
            waiting.extend(brought_by(name, extras))
    return names
