"""What the figures were measured on: processor, cores and versions. No names of hosts, no paths."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop")
# What a reader asks about a processor when the subject is small matrices.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def describe() -> dict[str, Any]:
    """The machine and the versions, as JSON."""
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "instructions": _instructions(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("outrider", *PACKAGES)},
    }


def command(program: str, arguments: Sequence[str]) -> str:
    """The command that was run; of folders outside the working directory only the last part."""
    return shlex.join(["python", "-m", program, *(_shortened(argument) for argument in arguments)])


def load_average() -> float | None:
    """Processes that wanted a core over the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _shortened(argument: str) -> str:
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _cpu_model() -> str:
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in info:
        return name
    return f"{name} (family {info['cpu family']}, model {info.get('model', '?')})"


def _instructions() -> list[str]:
    flags = _cpuinfo().get("flags", "").split()
    return [name for name in _INSTRUCTIONS if name in flags]


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
