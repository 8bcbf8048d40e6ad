"""The image is built by its own steps, and its services run as the manifests say, in namespaces of their own.

A pod gets environment, mounts, user and read-only root from its manifest. Unlike in a cluster, pods are on one machine
(`tests.network`), names are in `/etc/hosts`, and no policy is enforced.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.deploy.image_builder import PATH, Builder, need_namespaces
from tests.deploy.manifests import SERVICES, Deployed, of_kind, rendered
from tests.machine import TOOLS
from tests.network import Network
from tests.project.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a machine that may be busy

CLIENT = "a-client"
TOKENS = 24

Mounts = Mapping[str, Path | None]
"""Read-only folders and files by their place in a pod; None is a folder in memory."""

_HEALTH = """
import sys
from outrider.rpc.channel import wait_for_health
address, *services = sys.argv[1:]
for service in services:
    wait_for_health(address, service, 400.0)
"""
_WRITE = """
import errno, json, os, sys
def tried(folder):
    try:
        with open(folder + "/tried", "w"):
            return "written"
    except OSError as error:
        return errno.errorcode[error.errno]
print(json.dumps({"uid": os.getuid()} | {folder: tried(folder) for folder in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    need_namespaces()
    return Builder(tmp_path_factory.mktemp("image"))


def test_the_image_holds_the_project_and_no_installer(image: Builder) -> None:
    root, env = image.build("draft"), {"PATH": PATH}
    where = "import outrider, draft_service, verifier_service; print(outrider.__file__)"
    assert root.run(["/opt/outrider/bin/python", "-P", "-c", where], env=env).startswith("/opt/outrider/lib/")
    code = "import importlib.util as u; print([u.find_spec(n) is None for n in ('pip', 'setuptools')], end='')"
    assert root.run(["/usr/local/bin/python", "-P", "-c", code], env=env) == "[True, True]"


@dataclass
class Pod:
    """A running container."""

    process: subprocess.Popen[str]
    log: Path

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Node:
    """A machine with a network of its own, on which both services of the overlay `mtls` run, and a client."""

    def __init__(self, image: Builder, folder: Path) -> None:
        self.services = {service: Deployed("overlays/mtls", service) for service in SERVICES}
        self._secrets: dict[str, Path] = {}
        authority = Authority(folder / "authority")
        for spec in (each["spec"] for each in of_kind(rendered("overlays/mtls"), "Certificate")):
            if not spec.get("isCA"):  # cert-manager makes a Secret of each
                issued = authority.issue(*spec["dnsNames"])
                secret = self._secrets[spec["secretName"]] = folder / spec["secretName"]
                secret.mkdir()
                for name, file in (("tls.crt", issued.cert), ("tls.key", issued.key), ("ca.crt", authority.pem)):
                    (secret / name).write_bytes(file.read_bytes())
        names = [*(each.name for each in self.services.values()), CLIENT]
        self.network = Network(folder, dict.fromkeys(names, ()), own_processes=True)
        self.pods: dict[str, Pod] = {}
        self.started: list[Pod] = []
        self._image = image
        self._folder = folder
        # A DNS query fails at once.
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n", encoding="utf-8")

    def start_service(self, service: str, *command: str) -> Pod:
        """Start the container of a service, by its manifest; or another command in its place."""
        deployed = self.services[service]
        volumes = [volume for volume in deployed.spec["volumes"] if "secret" in volume]
        folders = {volume["name"]: self._secrets[volume["secret"]["secretName"]] for volume in volumes}
        mounts = {mount["mountPath"]: folders.get(mount["name"]) for mount in deployed.container["volumeMounts"]}
        command = command or self._image.stages[service].entry_point()
        user = deployed.spec["securityContext"]["runAsUser"]
        return self._start(deployed.name, service, command, deployed.environment, mounts, user)

    def generate(self, *options: str) -> tuple[int, str]:
        """Run the command line as a client in a pod of its own; return its exit code and output."""
        address = f"outrider-draft:{self.services['draft'].ports['grpc']}"
        command = ["outrider", "generate", "--draft", address, "--json", "--temperature", "0"]
        command += ["--max-new-tokens", str(TOKENS), "--tls-ca", "/tls/ca.crt", *options, "def area(radius):"]
        mounts = {"/tmp": None, "/tls": self._secrets["outrider-client-tls"]}
        pod = self._start(CLIENT, "draft", command, {}, mounts, 65432)
        return pod.process.wait(400.0), pod.output()

    def _start(
        self, name: str, target: str, command: Sequence[str], env: Mapping[str, str], mounts: Mounts, user: int
    ) -> Pod:
        env = self._image.stages[target].environment() | dict(env)
        files = {
            "/etc/hosts": self.network.names,
            "/etc/resolv.conf": self._folder / "resolv.conf",
            "/sys": Path("/sys"),
        }
        sources = {**mounts, **files}.items()
        more = [("ro", str(source), path) if source else ("tmpfs", "none", path) for path, source in sources]
        # Another user id, without any privilege, and in a namespace that cannot undo a mount.
        becoming = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}"]
        alone = ["env", "-i", *(f"{key}={value}" for key, value in env.items()), *command]
        entering = self._image.build(target).command([*becoming, *alone], more=more, read_only=True)
        log = self._folder / f"{name}-{len(self.started)}.log"
        with log.open("w", encoding="utf-8") as written:
            process = subprocess.Popen(
                [*self.network.on(name), "unshare", "--mount", *entering],
                stdout=written,
                stderr=subprocess.STDOUT,
                text=True,
                env=TOOLS,
            )
        self.started.append(Pod(process, log))
        return self.started[-1]

    def wait_ready(self, service: str) -> None:
        """Wait until its probes succeed at the switch, which like a kubelet reaches all pods by address."""
        container = self.services[service].container
        probes = [container[f"{kind}Probe"]["grpc"]["service"] for kind in ("startup", "liveness", "readiness")]
        entering = self.network.at_the_switch(in_mounts=False)
        command = [*entering, sys.executable, "-c", _HEALTH, self.address(service, "health"), *probes]
        with subprocess.Popen(command, cwd=ROOT) as program:
            try:
                while program.poll() is None:
                    for pod in self.pods.values():
                        assert pod.process.poll() is None, f"a service ended: {pod.output()}"
                    time.sleep(0.1)
            finally:
                program.kill()
        assert program.returncode == 0

    def address(self, service: str, port: str) -> str:
        deployed = self.services[service]
        return f"{self.network.address(deployed.name)}:{deployed.ports[port]}"


@pytest.fixture(scope="module")
def node(image: Builder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Both services are ready."""
    node = Node(image, tmp_path_factory.mktemp("node"))
    try:
        with node.network:  # whose end is the end of all that runs in it
            for service in SERVICES:
                node.pods[service] = node.start_service(service)
            for service in SERVICES:
                node.wait_ready(service)
            yield node
    finally:
        for pod in node.started:
            pod.process.wait(60)
            print(f"--- {pod.log.stem}\n{pod.output()[-4000:]}")


def test_a_client_gets_text_and_services_show_the_metrics_that_manifests_name(node: Node) -> None:
    certificate = ["--tls-cert", "/tls/tls.crt", "--tls-key", "/tls/tls.key"]
    code, output = node.generate(*certificate)
    assert code == 0, output
    result = json.loads(output)
    assert len(result["token_ids"]) == TOKENS
    assert result["statistics"]["num_accepted_tokens"] > 0
    shown: set[str] = set()
    for service in SERVICES:
        text = node.network.fetch(f"http://{node.address(service, 'metrics')}/metrics")
        # A rule names a histogram's series, a document the histogram.
        shown |= set(re.findall(r"^(?:# TYPE )?(outrider_\w+)", text, re.MULTILINE))
        (used,) = re.findall(r"^process_resident_memory_bytes (\S+)", text, re.MULTILINE)
        limit = node.services[service].container["resources"]["limits"]["memory"]
        assert float(used) < int(limit.removesuffix("Mi")) * 2**20
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "how-to").glob("*.md")]
    # Objects and not text, so that comments do not count.
    texts += [json.dumps(rendered(f"plaintext+{name}")) for name in ("hpa", "keda", "monitoring")]
    # The HTTP front has metrics of its own.
    assert set(re.findall(r"\boutrider_(?!http_)\w+", "\n".join(texts))) - shown == set()


def test_a_client_needs_a_certificate(node: Node) -> None:
    code, output = node.generate("--timeout", "8")
    assert code == 1, output
    assert re.search("UNAVAILABLE|DEADLINE_EXCEEDED", output), output


def test_only_the_mounts_of_the_manifest_can_be_written(node: Node) -> None:
    for service in SERVICES:
        mounts = node.services[service].container["volumeMounts"]
        writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
        fixed = ["", "/opt/outrider", "/usr/local/lib", "/tls"]
        pod = node.start_service(service, "python", "-c", _WRITE, *writable, *fixed)
        assert pod.process.wait(300) == 0, pod.output()
        found = json.loads(pod.output())
        assert found.pop("uid") == 10001
        assert found == dict.fromkeys(writable, "written") | dict.fromkeys(fixed, "EROFS")


def test_sigterm_ends_a_pod_within_its_grace_period(node: Node) -> None:
    for service in SERVICES:
        process = node.pods.pop(service).process
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(node.services[service].spec["terminationGracePeriodSeconds"]) == 0
