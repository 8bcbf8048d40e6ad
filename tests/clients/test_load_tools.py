"""Load tools measure the front: GuideLLM and AIPerf, a short run each."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Program
from tests.cluster import MODELS

pytestmark = pytest.mark.slow


def test_guidellm(program: Program, front: str, tmp_path: Path) -> None:
    output = tmp_path / "benchmarks.json"
    program(
        "guidellm", "run", "--backend", f"kind=openai_http,target={front},model=target,request_format=/v1/completions",
        "--tokenizer", f"kind=hf_auto,model={MODELS / 'target'}", "--profile", "kind=synchronous",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--constraint", "kind=max_requests,count=6",
        "--output", f"kind=json,path={output}", "--disable-console",
    )  # fmt: skip
    (run,) = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    assert len(run["requests"]["successful"]) == 6
    assert not run["requests"]["errored"]


def test_aiperf(program: Program, front: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    program(
        "aiperf", "profile", "--model", "target", "--url", front, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", "demo/target", "--request-count", "6", "--concurrency", "2",
        "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--output-artifact-dir", str(folder),
        "--ui", "none",
    )  # fmt: skip
    (export,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(export.read_text(encoding="utf-8"))
    assert found["request_count"]["avg"] == 6
    assert not found.get("error_summary")
