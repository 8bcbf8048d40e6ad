"""Both services in one process: the draft service calls the verifier beside it, without a network."""

import asyncio
from typing import Any

from benchmarks.one_process import OneProcess
from draft_service.settings import DraftSettings
from protos.outrider.v1 import draft_service_pb2
from tests.draft_service.calls import request
from tests.project.tree import ROOT
from verifier_service.settings import VerifierSettings

MODEL = str(ROOT / "models" / "demo" / "draft")


class Context:
    """The responses of a call."""

    def __init__(self) -> None:
        self.responses: list[draft_service_pb2.GenerateResponse] = []

    async def write(self, response: draft_service_pb2.GenerateResponse) -> None:
        self.responses.append(response)

    def time_remaining(self) -> float:
        return 60.0

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def _nothing() -> None: ...


async def test_the_draft_service_calls_the_verifier_in_its_process() -> None:
    how: dict[str, Any] = {"model": MODEL, "dtype": "float32", "threads": 1, "max_sequences": 2}
    draft = DraftSettings(**how, drafter="none", verifier=("127.0.0.1:1",))
    app, context = OneProcess(VerifierSettings(**how, kv_cache_mb=16), draft), Context()
    try:
        async with asyncio.timeout(30.0):
            await app.load(_nothing)
            await app._servicer.generate(request(max_new_tokens=3, ignore_eos=True), context)
    finally:
        app.stop()
    assert context.responses[-1].finished.usage.completion_tokens == 3
