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
from tests.deploy.manifests import DEPLOY, base, overlaid, selects, the
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


DOCUMENTS: list[dict[str, Any]] = [yaml.safe_load(block) for block in _blocks(KUBERNETES, "yaml")]
(JOB,) = (document["spec"]["template"] for document in DOCUMENTS if document["kind"] == "Job")


def test_images_are_built_by_targets_and_arguments_that_are_there() -> None:
    for command in (each for each in _commands("docker") if each[1] == "build"):
        options = dict(zip(command[2:-1:2], command[3:-1:2], strict=True))
        assert (ROOT / options["-f"]).is_file()
        assert options["--target"] in stages(options["--build-arg"].removeprefix("VARIANT="))
    arguments = re.findall(r"--build-arg (\w+)=", KUBERNETES.read_text(encoding="utf-8"))
    assert set(arguments) <= set(re.findall(r"ARG (\w+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))


def test_what_is_applied_is_there() -> None:
    for path in (each[each.index("-k") + 1] for each in _commands("kubectl") if "-k" in each):
        assert (ROOT / path / "kustomization.yaml").is_file(), path


def test_clients_are_asked_as_the_command_line_takes_it() -> None:
    known = {option for parameter in generate_command.params for option in parameter.opts}
    for words in (*_commands("outrider"), JOB["spec"]["containers"][0]["command"]):
        assert words[1] == "generate"
        assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_files_that_a_reader_writes_render(document: dict[str, Any]) -> None:
    objects = overlaid(document) if document["kind"] == "Kustomization" else (document,)
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)
    text = yaml.safe_dump_all(objects)
    assert all(image["newName"] in text for image in document.get("images", ()))


def test_the_client_of_the_example_is_let_in() -> None:
    draft = the(base(), "NetworkPolicy", "outrider-draft")
    labels = JOB["metadata"]["labels"]
    assert any(selects(peer["podSelector"], labels) for rule in draft["spec"]["ingress"] for peer in rule["from"])


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
