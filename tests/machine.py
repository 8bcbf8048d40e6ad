"""Tests skip, or fail with `CI`, where the machine lacks tools or rights that they need."""

import os
import shutil
import subprocess
from typing import NoReturn

import pytest

# Tools for mounts and links are on the PATH of root alone.
TOOLS = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
# A link to a switch, in a network of its own.
_PROBE = "ip link add probe type bridge && ip link add port type veth peer name eth0 && ip link set port master probe"


def absent(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI skips none", pytrace=False)
    pytest.skip(reason)


def need_tools(*names: str) -> None:
    for name in names:
        if shutil.which(name, path=TOOLS["PATH"]) is None:
            absent(f"{name} is not on PATH")


def need_networks() -> None:
    """Skip the test where users cannot make networks on this machine."""
    need_tools("unshare", "nsenter", "mount", "ip")
    command = [*UNSHARE, "--pid", "--fork", "--mount-proc", "sh", "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=TOOLS)
    if done.returncode != 0:
        absent(f"this machine makes no user namespaces with networks: {done.stderr.strip()}")
