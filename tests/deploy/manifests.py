"""Manifests as a cluster would get them: rendered by `kubectl kustomize`, and asked for their parts."""

import argparse
import json
import os
import re
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

# For each object that it validates it would read a megabyte of schemas anew.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def folders(kind: str) -> list[str]:
    """The names of all `overlays` or `components`."""
    return sorted(path.parent.name for path in (DEPLOY / kind).glob("*/kustomization.yaml"))


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """An overlay of ours."""
    return kustomized(DEPLOY / "overlays" / overlay)


@cache
def composed(*components: str) -> tuple[Manifest, ...]:
    """The base with `components`, in that order, as an overlay of somebody else's would have them.

    Raises:
        subprocess.CalledProcessError: they do not go together.
    """
    components_of = [f"../../components/{name}" for name in components]
    return overlaid({"namespace": "elsewhere", "resources": ["../../base"], "components": components_of})


def overlaid(kustomization: Mapping[str, Any]) -> tuple[Manifest, ...]:
    """What a `kustomization.yaml` makes of a copy of our folder, beside our overlays."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "deploy"
        shutil.copytree(DEPLOY, copy)
        overlay = copy / "overlays" / "another"
        overlay.mkdir()
        kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kind | dict(kustomization)), encoding="utf-8")
        return kustomized(overlay)


@cache
def base() -> tuple[Manifest, ...]:
    """The base alone."""
    return kustomized(DEPLOY / "base")


def kustomized(folder: Path) -> tuple[Manifest, ...]:
    """What `kubectl kustomize` makes of a folder."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        absent("kubectl is not on PATH")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return tuple(each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each is not None)


def of_kind(objects: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] in kinds]


def the(objects: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of `matchLabels` alone takes an object with these labels; an empty one takes all."""
    assert set(selector) <= {"matchLabels"}, f"the test cannot read {selector}"
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


@dataclass(frozen=True)
class Deployed:
    """One service in a set of manifests."""

    objects: tuple[Manifest, ...]
    service: str

    @property
    def name(self) -> str:
        return f"outrider-{self.service}"

    @property
    def workload(self) -> Manifest:
        """What makes its pods: a Deployment, or where they come in groups a LeaderWorkerSet."""
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
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.pod["metadata"]["labels"]
        return found

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
        """What a container gets from ConfigMaps and by itself, without what comes from a Secret."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= the(self.objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        return found | {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}

    @property
    def settings(self) -> Any:
        """The service's own settings, as its process would read them."""
        given = {name: value for name, value in self.environment.items() if name.startswith(PREFIX)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        with mock.patch.dict(os.environ, {**kept, **given}, clear=True):
            return SETTINGS[self.service].from_command_line(list(self.container.get("args", ())), program=self.service)


@cache
def metric_names() -> frozenset[str]:
    """The metrics in rules, dashboards and scalers, and those that operators are told to look at."""
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "how-to").glob("*.md")]
    # Objects and not text, so that comments do not count.
    texts += [json.dumps(composed("plaintext", name)) for name in ("hpa", "keda", "monitoring")]
    return frozenset(re.findall(r"\boutrider_\w+", "\n".join(texts)))


# ----------------------------------------------------------------------------------------------------------- torchrun

_TORCHRUN = ["python", "-m", "torch.distributed.run"]

# What the LeaderWorkerSet controller puts into the environment of each pod, for the last pod of a group of two.
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "outrider-verifier-ranks-0.somewhere"}


def torchrun_arguments(container: Manifest, environment: Mapping[str, str]) -> argparse.Namespace | None:
    """Its arguments as torchrun reads them, variables put in; None of a container that does not run it."""
    command: list[str] = list(container.get("command", ()))
    if command[: len(_TORCHRUN)] != _TORCHRUN:
        return None
    words = command[len(_TORCHRUN) :]
    for name, value in environment.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words), f"a variable that nobody sets: {words}"
    return get_args_parser().parse_args(words)


def ranks_of_a_pod(container: Manifest, environment: Mapping[str, str]) -> int:
    """How many processes of a service run in it."""
    arguments = torchrun_arguments(container, {**GROUP, **environment})
    return 1 if arguments is None else int(arguments.nproc_per_node)
