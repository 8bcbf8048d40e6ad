"""The image is built by its own steps, and its services run as the manifests say, in namespaces of their own."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.deploy.image_builder import PATH, Builder, entry_point, environment, need_namespaces, stages
from tests.deploy.manifests import SERVICES, Deployed, Manifest, metric_names, of_kind, rendered
from tests.deploy.pods import Node, Pod, mounts

pytestmark = pytest.mark.timeout(900)  # two services start twice, on a machine that may be busy

CLIENT = "a-client"
TOKENS = 24

_HEALTH = """
import json, sys
from outrider.rpc.channel import wait_for_health
address, *services = sys.argv[1:]
for service in services:
    wait_for_health(address, service, 400.0)
print(json.dumps(services))
"""
_PLAINTEXT = """
import json, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
def answers(address):
    with grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            return True
        except grpc.RpcError:
            return False
print(json.dumps([answers(address) for address in sys.argv[1:]]))
"""
_SCRAPE = """
import json, sys, urllib.request
print(json.dumps(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode()))
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


class Running:
    """Both services of an overlay, as pods of one node."""

    def __init__(self, overlay: str, image: Builder, node: Node, secrets: dict[str, Path]) -> None:
        self.services = {service: Deployed(rendered(overlay), service) for service in SERVICES}
        self.node = node
        self.secrets = secrets
        self._image = image
        self.pods = {service: self.start(service) for service in SERVICES}

    def start(self, service: str, command: list[str] | None = None) -> Pod:
        """The container of a service, by its manifest; or another command in its place."""
        deployed = self.services[service]
        return self.node.start(
            deployed.name,
            self._image.build(service),
            command or entry_point(stages(), service),
            env={**environment(stages(), service, {"PATH": PATH}), **deployed.environment},
            mounts=mounts(deployed, self.secrets),
            user=deployed.spec["securityContext"]["runAsUser"],
        )

    def ask(self, *options: str) -> tuple[int, str]:
        """What the command line prints for a client in a pod of its own: exit code and output."""
        address = f"outrider-draft:{self.services['draft'].ports['grpc']}"
        command = ["generate", "--draft", address, "--json", "--temperature", "0", "--max-new-tokens", str(TOKENS)]
        secret = [("ro", str(folder), "/tls") for name, folder in self.secrets.items() if name == "outrider-client-tls"]
        pod = self.node.start(
            CLIENT,
            self._image.build("draft"),
            ["outrider", *command, *options, "def area(radius):"],
            env=environment(stages(), "draft", {"PATH": PATH}),
            mounts=[("tmpfs", "none", "/tmp"), *secret],
            user=65432,
        )
        return pod.process.wait(400.0), pod.said()

    def at(self, service: str, port: str) -> str:
        """An address for the node, which knows no names."""
        deployed = self.services[service]
        return f"{self.node.address(deployed.name)}:{deployed.ports[port]}"

    def scrape(self, service: str) -> str:
        text: str = self.node.ask(_SCRAPE, f"http://{self.at(service, 'metrics')}/metrics")
        return text


def _secrets(objects: tuple[Manifest, ...], folder: Path) -> dict[str, Path]:
    """What cert-manager would make of the certificates that a manifest asks for."""
    authority = Authority(folder / "authority")
    found = {}
    for spec in (each["spec"] for each in of_kind(objects, "Certificate") if not each["spec"].get("isCA")):
        secret = found[spec["secretName"]] = folder / spec["secretName"]
        secret.mkdir()
        made = authority.issue(*spec["dnsNames"])
        for name, source in (("tls.crt", made.cert), ("tls.key", made.key), ("ca.crt", authority.pem)):
            (secret / name).write_bytes(source.read_bytes())
    return found


@pytest.fixture(scope="module", params=["demo", pytest.param("mtls", marks=pytest.mark.slow)])
def running(
    request: pytest.FixtureRequest, image: Builder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """An overlay at work: both services ready."""
    folder = tmp_path_factory.mktemp(request.param)
    secrets = _secrets(rendered(request.param), folder)
    for service in SERVICES:
        image.build(service)
    with Node(folder, [*(f"outrider-{service}" for service in SERVICES), CLIENT]) as node:
        running = Running(request.param, image, node, secrets)
        for service, each in running.pods.items():
            spec = running.services[service].container
            probes = [spec[kind]["grpc"]["service"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
            node.ask(_HEALTH, running.at(service, "health"), *probes, of=[each])
        yield running


def test_a_client_gets_text_and_the_manifests_name_metrics_that_are_shown(running: Running) -> None:
    tls = ["--tls-ca", "/tls/ca.crt", "--tls-cert", "/tls/tls.crt", "--tls-key", "/tls/tls.key"]
    code, said = running.ask(*(tls if running.secrets else ["--plaintext"]))
    assert code == 0, said
    done: dict[str, Any] = json.loads(said)
    assert len(done["token_ids"]) == TOKENS
    assert done["statistics"]["num_accepted_tokens"] > 0
    shown: set[str] = set()
    for service in SERVICES:
        text = running.scrape(service)
        # A rule names a histogram's series, a document the histogram.
        shown |= set(re.findall(r"^(?:# TYPE )?(outrider_\w+)", text, re.MULTILINE))
        (used,) = re.findall(r"^process_resident_memory_bytes (\S+)", text, re.MULTILINE)
        limit = running.services[service].container["resources"]["limits"]["memory"]
        assert float(used) < int(limit.removesuffix("Mi")) * 2**20
    assert metric_names() - shown == set()


def test_probes_need_no_certificate_and_clients_do(running: Running) -> None:
    addresses = {(service, name): running.at(service, name) for service in SERVICES for name in ("health", "grpc")}
    answers = dict(zip(addresses, running.node.ask(_PLAINTEXT, *addresses.values()), strict=True))
    assert answers == {(service, name): name == "health" or not running.secrets for service, name in addresses}
    if running.secrets:
        code, said = running.ask("--tls-ca", "/tls/ca.crt", "--timeout", "8")
        assert code == 1, said
        assert re.search("UNAVAILABLE|DEADLINE_EXCEEDED", said), said


def test_only_the_mounts_of_the_manifest_can_be_written(running: Running) -> None:
    for service in SERVICES:
        spec = running.services[service].container
        writable = [mount["mountPath"] for mount in spec["volumeMounts"] if not mount.get("readOnly")]
        fixed = ["", "/opt/outrider", "/usr/local/lib", *(["/tls"] if running.secrets else [])]
        tried = running.start(service, ["python", "-c", _WRITE, *writable, *fixed])
        assert tried.process.wait(300) == 0, tried.said()
        found = json.loads(tried.said())
        assert found.pop("uid") == 10001
        assert found == dict.fromkeys(writable, "written") | dict.fromkeys(fixed, "EROFS")


def test_a_pod_that_is_told_to_go_ends_well(running: Running) -> None:
    for service in SERVICES:
        each = running.pods[service]
        (child,) = Path(f"/proc/{each.process.pid}/task/{each.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        within = running.services[service].spec["terminationGracePeriodSeconds"]
        assert each.process.wait(within) == 0, each.said()
