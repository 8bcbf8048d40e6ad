"""Manifests as a cluster would get them: rendered by `kubectl kustomize`, with access to their parts."""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import kubernetes_validate
import yaml
from torch.distributed.run import get_args_parser

from draft_service.settings import DraftSettings
from outrider.service.settings import ServiceSettings
from tests.machine import absent
from tests.project.tree import ROOT
from verifier_service.settings import VerifierSettings

Manifest: TypeAlias = Mapping[str, Any]

DEPLOY = ROOT / "deploy"
SERVICES = ("draft", "verifier")
SETTINGS: Mapping[str, type[ServiceSettings]] = {"draft": DraftSettings, "verifier": VerifierSettings}
PREFIX = "OUTRIDER_"
# API groups that Kubernetes has no schemas of.
CUSTOM = (
    "cert-manager.io/",
    "gateway.networking.k8s.io/",
    "inference.networking.k8s.io/",
    "keda.sh/",
    "leaderworkerset.x-k8s.io/",
    "monitoring.coreos.com/",
)

# For each object that it validates it would read a megabyte of schemas anew, and twice the folder of all releases.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
kubernetes_validate.utils.all_versions = cache(kubernetes_validate.utils.all_versions)


@cache
def rendered(source: str) -> tuple[Manifest, ...]:
    """Render `base`, `overlays/NAME`, or components, `NAME+NAME`, as an overlay elsewhere has them.

    Raises:
        subprocess.CalledProcessError: components do not go together.
    """
    if source == "base" or source.startswith("overlays/"):
        return kustomized(DEPLOY / source)
    components = [f"../../components/{name}" for name in source.split("+")]
    return overlaid({"namespace": "elsewhere", "resources": ["../../base"], "components": components})


def overlaid(kustomization: Mapping[str, Any]) -> tuple[Manifest, ...]:
    """Render a `kustomization.yaml` in a copy of our folder, beside our overlays."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "deploy"
        shutil.copytree(DEPLOY, copy)
        overlay = copy / "overlays" / "another"
        overlay.mkdir()
        kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kind | dict(kustomization)), encoding="utf-8")
        return kustomized(overlay)


def kustomized(folder: Path) -> tuple[Manifest, ...]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        absent("kubectl is not on PATH")
    environment = {**os.environ, "GOGC": "off"}  # to look for garbage would take a quarter of its time
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    return tuple(each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each is not None)


def of_kind(objects: Iterable[Manifest], kind: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] == kind]


def the(objects: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The only object of that kind and name."""
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Say whether a label selector of `matchLabels` alone matches these labels; an empty one matches all."""
    assert set(selector) <= {"matchLabels"}, f"the test cannot read {selector}"
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


@dataclass(frozen=True)
class Deployed:
    """One service in the manifests that `rendered(source)` returns."""

    source: str
    service: str

    @property
    def objects(self) -> tuple[Manifest, ...]:
        return rendered(self.source)

    @property
    def name(self) -> str:
        return f"outrider-{self.service}"

    @property
    def workload(self) -> Manifest:
        """Its Deployment, or the LeaderWorkerSet where its pods come in groups."""
        groups = [each for each in of_kind(self.objects, "LeaderWorkerSet") if self.name in each["metadata"]["name"]]
        return groups[0] if groups else the(self.objects, "Deployment", self.name)

    @property
    def pod(self) -> Any:
        """Its pods that serve: metadata and spec."""
        spec = self.workload["spec"]
        return spec["leaderWorkerTemplate"]["leaderTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]

    @property
    def spec(self) -> Any:
        return self.pod["spec"]

    @property
    def labels(self) -> Any:
        return self.pod["metadata"]["labels"]

    @property
    def container(self) -> Any:
        (only,) = self.spec["containers"]
        return only

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def environment(self) -> dict[str, str]:
        return self.environment_of(self.container)

    def environment_of(self, container: Manifest) -> dict[str, str]:
        """A container's variables, but for those from a Secret."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= the(self.objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        return found | {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}

    @property
    def settings(self) -> Any:
        """The service's own settings, as its process would read them."""
        given = sorted(each for each in self.environment.items() if each[0].startswith(PREFIX))
        return _settings(self.service, tuple(given), tuple(self.container.get("args", ())))


@cache
def _settings(service: str, given: tuple[tuple[str, str], ...], arguments: tuple[str, ...]) -> ServiceSettings:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with mock.patch.dict(os.environ, {**kept, **dict(given)}, clear=True):
        return SETTINGS[service].from_command_line(list(arguments), program=service)


_TORCHRUN = ["python", "-m", "torch.distributed.run"]

# The variables that the LeaderWorkerSet controller sets in the last pod of a group of two.
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "outrider-verifier-ranks-0.somewhere"}


def torchrun_arguments(container: Manifest, environment: Mapping[str, str]) -> argparse.Namespace | None:
    """A container's arguments as torchrun reads them, variables filled in; None if it does not run torchrun."""
    command: list[str] = list(container.get("command", ()))
    if command[: len(_TORCHRUN)] != _TORCHRUN:
        return None
    words = command[len(_TORCHRUN) :]
    for name, value in environment.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words), f"a variable is not set: {words}"
    return get_args_parser().parse_args(words)
