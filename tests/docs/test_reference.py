"""The reference pages: the generated ones are up to date, and the others are complete and name no others."""

import re

import grpc

from docs.generate import pages
from outrider.client import OutriderError, errors
from outrider.client.client import Client
from outrider.client.events import Completion
from outrider.client.request import Options
from protos.outrider.v1 import model_pb2
from tests.project.tree import ROOT

REFERENCE = ROOT / "docs" / "reference"


def _page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def _named(text: str) -> set[str]:
    """The words in backticks, fenced blocks aside."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)))


def test_generated_pages_are_up_to_date() -> None:
    stale = [name for name, text in pages().items() if _page(name) != text]
    assert not stale, f"run `make reference`: {stale}"


def test_links_inside_the_contract_lead_somewhere() -> None:
    page = _page("contract.md")
    there = {name.lower() for name in re.findall(r"^### `(\w+)`$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= there


def test_every_reason_has_its_row_with_its_status() -> None:
    rows = set(re.findall(r"^\| ([A-Z_]+) \| `([A-Z_]+)` \|", _page("errors.md"), re.MULTILINE))
    reasons = {name.removeprefix("ERROR_REASON_") for name in model_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert {reason for _, reason in rows} == reasons
    contract = (ROOT / "protos" / "outrider" / "v1" / "model.proto").read_text(encoding="utf-8")
    for status, reason in rows:
        assert hasattr(grpc.StatusCode, status)
        (comment,) = re.findall(rf"((?:  //.*\n)+)  ERROR_REASON_{reason} =", contract)
        assert f"{status}: " in comment, reason


def test_every_option_and_exception_of_the_client_is_named() -> None:
    named = _named(_page("client.md"))
    options = set(Options.__annotations__)
    kinds = {
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)
    }
    assert options <= named
    assert kinds <= named


def test_the_members_that_the_client_page_names_exist() -> None:
    page = _page("client.md")
    for name in re.findall(r"`client\.(\w+)", page):
        assert hasattr(Client, name), name
    fields = set(Completion.__dataclass_fields__) | {name for name in vars(Completion) if not name.startswith("_")}
    for name in re.findall(r"`completion\.(\w+)", page):
        assert name in fields, name
