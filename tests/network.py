"""A network of hosts on one switch, all on this machine: namespaces that any user may make.

Each host has an address and a link of its own, and reaches the others by name. Files and users are the machine's.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.machine import TOOLS, UNSHARE

# Ends with its standard input.
_SWITCH = """
set -e
mount --bind "$1" /etc/hosts
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
ip link add switch type bridge
ip addr add "$2/24" dev switch
ip link set switch up
echo up
exec cat
"""
_HOST = """
set -e
ip netns add "$1"
ip link add "$2" type veth peer name eth0 netns "$1"
ip link set "$2" master switch up
ip -n "$1" link set lo up
ip -n "$1" addr add "$3/24" dev eth0
ip -n "$1" link set eth0 up
"""
_SUBNET = "10.77.0"


class Network:
    """Hosts that are linked to one switch, with their names in the file `names`. A context manager.

    `on` and `at_the_switch` return the prefix of a command that runs there.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, Sequence[str]], *, own_processes: bool = False) -> None:
        """
        Args:
            hosts: the name of each, and names that it shares with others.
            own_processes: whether commands see no other processes, and are killed at the end.
        """
        self._hosts = tuple(hosts)
        self._pid_namespace = ["--pid"] if own_processes else []
        self.names = folder / "hosts"
        lines = [" ".join((self.address(host), host, *shared)) for host, shared in hosts.items()]
        self.names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n", encoding="utf-8")

    def address(self, host: str) -> str:
        """Of a host, without a port."""
        return f"{_SUBNET}.{10 + self._hosts.index(host)}"

    def __enter__(self) -> Self:
        own = [*self._pid_namespace, "--mount-proc"] if self._pid_namespace else []
        self._holder = subprocess.Popen(
            [*UNSHARE, *own, "--fork", "--kill-child", "sh", "-c", _SWITCH, "switch", self.names, f"{_SUBNET}.1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=TOOLS,
            start_new_session=True,  # a terminal's Ctrl-C is for the tests
        )
        try:
            assert self._holder.stdout is not None
            assert self._holder.stdout.readline().strip() == "up", self._holder.communicate()[1]
            (self._pid,) = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
            for host in self._hosts:
                self._run("sh", "-c", _HOST, "host", host, self._port(host), self.address(host))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._holder.kill()
        self._holder.communicate()

    def namespaces(self, host: str) -> list[str]:
        """The files of what a process on this host enters, in turn."""
        return [*(f"/proc/{self._pid}/ns/{kind}" for kind in ("user", "mnt")), self.file(host)]

    def at_the_switch(self, *, in_mounts: bool = True) -> list[str]:
        """On no host, where all can be reached; without `in_mounts` with the machine's own files."""
        return self._entering("--net", *(["--mount", *self._pid_namespace] if in_mounts else []))

    def on(self, host: str) -> list[str]:
        return [*self._entering("--mount", *self._pid_namespace), "nsenter", f"--net={self.file(host)}"]

    @staticmethod
    def file(host: str) -> str:
        """The file of a host's network namespace, where names are known."""
        return f"/run/netns/{host}"

    def _entering(self, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", self._pid, "--user", *namespaces, "--preserve-credentials"]

    def fetch(self, url: str) -> str:
        """Get a URL from the switch, which reaches all hosts by address."""
        program = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"
        command = [*self.at_the_switch(in_mounts=False), sys.executable, "-c", program, url]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=TOOLS).stdout

    def cut(self, host: str) -> None:
        """Disconnect a host's link at the switch."""
        self._run("ip", "link", "set", self._port(host), "down")

    def mend(self, host: str) -> None:
        self._run("ip", "link", "set", self._port(host), "up")

    def _port(self, host: str) -> str:
        return f"port{self._hosts.index(host)}"  # a link's name has 15 letters at most

    def _run(self, *command: str) -> None:
        entering = self.at_the_switch()
        done = subprocess.run([*entering, *command], capture_output=True, text=True, check=False, env=TOOLS)
        assert done.returncode == 0, done.stderr
