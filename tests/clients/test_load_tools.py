"""Load tools measure the front: GuideLLM and AIPerf, a short run each of the commands on the page."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Program, command

pytestmark = pytest.mark.slow


def test_guidellm(program: Program, front: str, tmp_path: Path) -> None:
    output = tmp_path / "benchmarks.json"
    sizes = {"prompt_tokens=256": "prompt_tokens=32", "output_tokens=128": "output_tokens=16", "count=50": "count=6"}
    program(*command("guidellm", front, **sizes), "--output", f"kind=json,path={output}", "--disable-console")
    (run,) = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    assert len(run["requests"]["successful"]) == 6
    assert not run["requests"]["errored"]


def test_aiperf(program: Program, front: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    values = {
        "ORG/MODEL": "demo/target",
        "--concurrency 4": "--concurrency 2",
        "--request-count 50": "--request-count 6",
    }
    program(
        *command("aiperf", front, **values),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"),
        *("--output-artifact-dir", str(folder), "--ui", "none"),
    )
    (export,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(export.read_text(encoding="utf-8"))
    assert found["request_count"]["avg"] == 6
    assert not found.get("error_summary")
    (records,) = folder.rglob("profile_export.jsonl")
    metrics = [json.loads(line)["metrics"] for line in records.read_text(encoding="utf-8").splitlines()]
    assert all("spec_decode_acceptance_length" in each for each in metrics), "it takes the statistics of every text"
    assert len(metrics) == 6
