"""Pages name the images, manifests and alerts that `deploy` has. `tests/docs` has their commands."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import kubernetes_validate
import pytest
import yaml

from outrider.cli.generate import generate_command
from tests.deploy.image_builder import stages
from tests.deploy.manifests import CUSTOM, DEPLOY, Manifest, of_kind, overlaid, rendered, selects, the
from tests.docs.pages import blocks
from tests.project.tree import ROOT

GUIDES = ROOT / "docs" / "how-to"
KUBERNETES, SEVERAL_GPUS, OPERATE = (GUIDES / f"{name}.md" for name in ("kubernetes", "several-gpus", "operate"))

DOCUMENTS: list[dict[str, Any]] = [
    yaml.safe_load(block.text) for page in (KUBERNETES, SEVERAL_GPUS) for block in blocks(page, "yaml")
]
(JOB,) = (document["spec"]["template"] for document in DOCUMENTS if document["kind"] == "Job")


def test_targets_and_arguments_of_builds_exist() -> None:
    lines = [line for block in blocks(KUBERNETES, "sh") for line in block.text.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("docker build ")]
    assert commands
    for command in commands:
        options = dict(zip(command[2:-1:2], command[3:-1:2], strict=True))
        assert (ROOT / options["-f"]).is_file()
        assert options["--target"] in stages(options["--build-arg"].removeprefix("VARIANT="))
    arguments = re.findall(r"--build-arg (\w+)=", KUBERNETES.read_text(encoding="utf-8"))
    assert set(arguments) <= set(re.findall(r"ARG (\w+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))


def test_options_of_the_example_exist() -> None:
    known = {option for parameter in generate_command.params for option in parameter.opts}
    command = JOB["spec"]["containers"][0]["command"]
    assert command[:2] == ["outrider", "generate"]
    assert {word for word in command if word.startswith("--")} <= known


def _idle_scalers(objects: Sequence[Manifest]) -> list[str]:
    """Scalers of a Deployment that is not there."""
    deployments = {each["metadata"]["name"] for each in of_kind(objects, "Deployment")}
    scalers = [each for kind in ("HorizontalPodAutoscaler", "ScaledObject") for each in of_kind(objects, kind)]
    return [each["metadata"]["name"] for each in scalers if each["spec"]["scaleTargetRef"]["name"] not in deployments]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_files_that_a_reader_writes_render(document: dict[str, Any]) -> None:
    objects = overlaid(document) if document["kind"] == "Kustomization" else (document,)
    assert _idle_scalers(objects) == []
    for each in objects:
        if not each["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(each, "1.37", strict=True)
    text = yaml.safe_dump_all(objects)
    assert all(image["newName"] in text for image in document.get("images", ()))


def test_the_page_names_the_components_that_groups_of_pods_exclude() -> None:
    broken, idle = set(), set()
    for path in (DEPLOY / "components").glob("*/kustomization.yaml"):
        name = path.parent.name
        try:
            objects = overlaid({"resources": ["../tensor-parallel"], "components": [f"../../components/{name}"]})
        except subprocess.CalledProcessError:
            broken.add(name)
            continue
        if _idle_scalers(objects):
            idle.add(name)
    text = " ".join(SEVERAL_GPUS.read_text(encoding="utf-8").split())
    (sentence,) = re.findall(r"Its verifiers are no Deployment: (.*?)\. ", text)
    excluded, limited = (set(re.findall(r"`([\w-]+)`", part)) for part in sentence.split(" do not go with it, "))
    assert (excluded, limited) == (broken, idle)


def test_policies_admit_the_client_of_the_example() -> None:
    draft = the(rendered("base"), "NetworkPolicy", "outrider-draft")
    labels = JOB["metadata"]["labels"]
    assert any(selects(peer["podSelector"], labels) for rule in draft["spec"]["ingress"] for peer in rule["from"])


def test_every_alert_is_described() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts" / "outrider.yaml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^\| `(Outrider\w+)`", OPERATE.read_text(encoding="utf-8"), re.MULTILINE) == alerts
