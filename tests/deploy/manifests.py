"""Manifests as a cluster would get them: rendered by `kubectl kustomize`, and asked for their parts."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import kubernetes_validate
import yaml

from tests.machine import absent
from tests.project.tree import ROOT

Manifest: TypeAlias = Mapping[str, Any]

DEPLOY = ROOT / "deploy"
SERVICES = ("draft", "verifier")

# For each object that it judges it would read a megabyte of schemas anew.
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
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "deploy"
        shutil.copytree(DEPLOY, copy)
        overlay = copy / "overlays" / "composed"
        overlay.mkdir()
        file = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "elsewhere",
            "resources": ["../../base"],
            "components": [f"../../components/{name}" for name in components],
        }
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
        return kustomized(overlay)


@cache
def base() -> tuple[Manifest, ...]:
    """The base alone."""
    return kustomized(DEPLOY / "base")


def kustomized(folder: Path) -> tuple[Manifest, ...]:
    """What `kubectl kustomize` makes of a folder.

    Raises:
        subprocess.CalledProcessError: nothing.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        absent("kubectl is not on PATH")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return tuple(each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each is not None)


# ------------------------------------------------------------------------------------------------------------- parts


def of_kind(objects: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


def the(objects: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def workload(objects: Iterable[Manifest], service: str) -> Manifest:
    """What makes a service's pods: its Deployment, or where they come in groups its LeaderWorkerSet."""
    groups = of_kind(objects, "LeaderWorkerSet")
    found = [each for each in groups if each["metadata"]["name"] == f"outrider-{service}-ranks"]
    return found[0] if found else the(objects, "Deployment", f"outrider-{service}")


def pod(objects: Iterable[Manifest], service: str) -> Manifest:
    """What a service's pods are, those that serve: metadata and spec."""
    spec = workload(objects, service)["spec"]
    template: Manifest = (
        spec["leaderWorkerTemplate"]["leaderTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]
    )
    return template


def container(objects: Iterable[Manifest], service: str) -> Manifest:
    """The one container of a service's pods."""
    (only,) = pod(objects, service)["spec"]["containers"]
    found: Manifest = only
    return found


def environment(objects: Iterable[Manifest], service: str, *, init: bool = False) -> dict[str, str]:
    """What a container gets in its environment, from ConfigMaps and by itself.

    A variable that comes from a Secret has no value here, and is left out.
    """
    objects = tuple(objects)
    spec = pod(objects, service)["spec"]
    each = spec["initContainers"][0] if init else spec["containers"][0]
    found: dict[str, str] = {}
    for source in each.get("envFrom", ()):
        found |= the(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {entry["name"]: entry["value"] for entry in each.get("env", ()) if "value" in entry}


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of `matchLabels` alone takes an object with these labels; an empty one takes all."""
    assert set(selector) <= {"matchLabels"}, f"the test cannot judge {selector}"
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
