"""What the documents tell a reader to do is what the files and commands here take."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from draft_service.settings import DraftSettings
from outrider.cli.generate import generate_command
from tests.deploy.image_builder import stages
from tests.deploy.manifests import DEPLOY, Deployed, base, folders, overlaid, rendered, selects, the
from tests.project.tree import ROOT
from verifier_service.settings import VerifierSettings

KUBERNETES = ROOT / "docs" / "kubernetes.md"
OPERATIONS = ROOT / "docs" / "operations.md"


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _commands(program: str) -> list[list[str]]:
    lines = [line for block in _blocks(KUBERNETES, "sh") for line in block.splitlines()]
    words = [shlex.split(line.rstrip("& "), comments=True) for line in lines]
    found = [each for each in words if each and each[0] == program]
    assert found
    return found


def test_images_are_built_by_targets_and_arguments_that_are_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    builds = [each for each in _commands("docker") if each[1] == "build"]
    assert len(builds) == 4
    for command in builds:
        options = dict(zip(command[2:-1:2], command[3:-1:2], strict=True))
        variant = options["--build-arg"].removeprefix("VARIANT=")
        assert (ROOT / options["-f"]).is_file()
        assert options["--target"] in stages(variant)
        assert options["-t"] == f"outrider-{options['--target']}:0.1.0-{variant}"
    for argument in re.findall(r"--build-arg (\w+)=", KUBERNETES.read_text(encoding="utf-8")):
        assert f"ARG {argument}" in text


def test_what_is_applied_is_there() -> None:
    applied = [each[each.index("-k") + 1] for each in _commands("kubectl") if "-k" in each]
    assert applied
    for path in applied:
        assert (ROOT / path / "kustomization.yaml").is_file(), path


def test_clients_are_asked_as_the_command_line_takes_it() -> None:
    jobs = [document for document in _documents() if document["kind"] == "Job"]
    (command,) = (job["spec"]["template"]["spec"]["containers"][0]["command"] for job in jobs)
    for words in (*_commands("outrider"), command):
        assert words[1] == "generate"
        # Files are not there, and need not be.
        known = {option for parameter in generate_command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def _documents() -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in _blocks(KUBERNETES, "yaml")]


@pytest.mark.parametrize("number", range(len(_blocks(KUBERNETES, "yaml"))))
def test_files_that_a_reader_writes_render(number: int) -> None:
    document = _documents()[number]
    if document["kind"] != "Kustomization":
        kubernetes_validate.validate(document, "1.37", strict=True)
        return
    objects = overlaid(document)
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)
    text = yaml.safe_dump_all(objects)
    for image in document.get("images", ()):
        assert image["newName"] in text
    for generated in document.get("configMapGenerator", ()):
        assert all(literal.partition("=")[2] in text for literal in generated["literals"])


def test_the_client_of_the_example_is_let_in() -> None:
    (job,) = (document for document in _documents() if document["kind"] == "Job")
    draft = the(base(), "NetworkPolicy", "outrider-draft")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert any(selects(peer["podSelector"], labels) for rule in draft["spec"]["ingress"] for peer in rule["from"])
    secured = job["spec"]["template"]["spec"]
    # The namespace admits no pod with less than the services have.
    demo = Deployed(rendered("demo"), "draft").container
    assert secured["containers"][0]["securityContext"] == demo["securityContext"]


def test_overlays_and_components_are_described() -> None:
    text = KUBERNETES.read_text(encoding="utf-8")
    for kind in ("overlays", "components"):
        assert [name for name in folders(kind) if f"`{name}`" not in text] == []


def test_the_worked_example_comes_out_as_printed() -> None:
    (code,) = _blocks(OPERATIONS, "python")
    (printed,) = _blocks(OPERATIONS, "text")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == printed


@pytest.mark.parametrize("path", [KUBERNETES, OPERATIONS], ids=lambda path: path.name)
def test_settings_that_are_named_exist(path: Path) -> None:
    named = set(re.findall(r"\bOUTRIDER_[A-Z_]+", path.read_text(encoding="utf-8")))
    known = {f"OUTRIDER_{field.upper()}" for kind in (DraftSettings, VerifierSettings) for field in kind.model_fields}
    assert named - known == set()


def test_every_alert_is_described() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts" / "outrider.yaml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^\| `(Outrider\w+)`", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE) == alerts
