"""What the machine that runs the tests may lack, and what becomes of a test then."""

import os
import shutil
import subprocess
from functools import cache
from typing import NoReturn

import pytest

# What mounts and links lies where only root's shells look.
TOOLS = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}

# Namespaces as tests make them.
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
# A link to a switch, in a network of its own.
_PROBE = "ip link add probe type bridge && ip link add port type veth peer name eth0 && ip link set port master probe"


def absent(reason: str) -> NoReturn:
    """Skip the test, or fail it where all must run."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI skips none", pytrace=False)
    pytest.skip(reason)


def need_tools(*names: str) -> None:
    """Skips the test where a program is not there."""
    for name in names:
        if shutil.which(name, path=TOOLS["PATH"]) is None:
            absent(f"{name} is not on PATH")


def need_networks() -> None:
    """Skip the test where users cannot make networks on this machine."""
    need_tools("unshare", "nsenter", "mount", "ip")
    if trouble := _trouble(*UNSHARE, "--pid", "--fork", "--mount-proc", "sh", "-c", _PROBE):
        absent(f"this machine makes no user namespaces with networks: {trouble}")


@cache
def _trouble(*command: str) -> str:
    """What is wrong with a command; empty where nothing is."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=TOOLS)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
