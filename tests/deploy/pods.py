"""Pods of a manifest as processes: each with a network, a root and a user of its own, as a kubelet would have it.

What a pod gets is what its manifest says: environment, mounts, user, read-only root. What differs: pods lie on one
machine (`tests.network`), names are in `/etc/hosts`, and no policy is enforced.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.deploy.image_builder import Root
from tests.deploy.manifests import Deployed
from tests.machine import TOOLS
from tests.network import Network
from tests.project.tree import ROOT


@dataclass
class Pod:
    """A running container."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Node:
    """A machine with a network of its own, on which pods run. A context manager: all ends with it."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Logs and small files go to `folder`; each pod's address is known to all others by one of `names`."""
        self._folder = folder
        self._network = Network(folder, dict.fromkeys(names, ()), own_processes=True)
        self._pods: list[Pod] = []
        self._resolver = folder / "resolv.conf"
        # A question to DNS fails at once.
        self._resolver.write_text("nameserver 127.0.0.1\n", encoding="utf-8")

    def address(self, name: str) -> str:
        return self._network.address(name)

    def __enter__(self) -> Self:
        self._network.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.end()  # and with it all that runs in its namespaces
        for pod in self._pods:
            with suppress(subprocess.TimeoutExpired):
                pod.process.wait(10)
        if kind is not None:
            for pod in self._pods:
                print(f"--- {pod.name}\n{pod.said()[-4000:]}")

    def ask(self, code: str, *arguments: str, of: Sequence[Pod] = ()) -> Any:
        """What a Python program on the node prints as JSON: it reaches all pods, as a kubelet does.

        Raises:
            AssertionError: it failed, or one of the pods that it is about ended.
        """
        command = [*self._network.at_the_switch(in_mounts=False), sys.executable, "-c", code, *arguments]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        while asking.poll() is None:
            for pod in of:
                if pod.process.poll() is not None:
                    asking.kill()
                    raise AssertionError(f"{pod.name} ended with {pod.process.returncode}: {pod.said()}")
            time.sleep(0.05)
        out, err = asking.communicate()
        assert asking.returncode == 0, err
        return json.loads(out)

    def start(
        self,
        name: str,
        root: Root,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        mounts: Sequence[tuple[str, str, str]],
        user: int,
    ) -> Pod:
        """Start a container in the network of the pod `name`, with `env` alone, and `mounts` in its read-only root."""
        known = (("ro", str(self._network.names), "/etc/hosts"), ("ro", str(self._resolver), "/etc/resolv.conf"))
        more = [*mounts, *known, ("ro", "/sys", "/sys")]
        # Another user id, without any privilege, and in a namespace that cannot undo a mount.
        becoming = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}"]
        alone = ["env", "-i", *(f"{key}={value}" for key, value in env.items()), *command]
        entering = root.command([*becoming, *alone], more=more, read_only=True)
        log = self._folder / f"{name}-{len(self._pods)}.log"
        with log.open("w", encoding="utf-8") as written:
            process = subprocess.Popen(
                [*self._network.on(name), "unshare", "--mount", *entering],
                stdout=written,
                stderr=subprocess.STDOUT,
                text=True,
                env=TOOLS,
            )
        pod = Pod(name, process, log)
        self._pods.append(pod)
        return pod


def mounts(deployed: Deployed, secrets: Mapping[str, Path]) -> list[tuple[str, str, str]]:
    """What a container's volume mounts come to here: memory for an emptyDir, a folder for a Secret."""
    volumes = {volume["name"]: volume for volume in deployed.spec["volumes"]}
    found = []
    for mount in deployed.container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "emptyDir" in volume:
            assert not mount.get("readOnly")
            found.append(("tmpfs", "none", mount["mountPath"]))
        else:
            found.append(("ro", str(secrets[volume["secret"]["secretName"]]), mount["mountPath"]))
    return found
