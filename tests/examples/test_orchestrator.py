"""The loop in other hands: by `Propose` and `Verify` alone they write the text of `Generate`.

Once as the example does it, with the stubs; once as `grpcurl` would, with nothing but the services' reflection.
"""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from examples import orchestrator
from outrider.client import Client, Completion
from protos.outrider.v1 import sampling_pb2
from tests.draft_service import oracle

PROMPT, SEED, TOKENS = "def read_lines(path):\n", 7, 48

Outbox = SimpleQueue[dict[str, Any] | None]
"""Messages as JSON-like dictionaries; None ends them."""


@pytest.fixture(scope="module")
def written(draft_address: str) -> Completion:
    """The text of `Generate`."""
    with Client(draft_address) as client:
        return client.complete(PROMPT, temperature=0.8, seed=SEED, rule="coupled", max_new_tokens=TOKENS)


def test_the_example_writes_the_text_of_generate(
    draft_address: str, verifier_address: str, written: Completion
) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.8, seed=SEED, rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)
    prompt = written.started.prompt_token_ids
    with grpc.insecure_channel(draft_address) as draft, grpc.insecure_channel(verifier_address) as verifier:
        tokens = list(orchestrator.generate(draft, verifier, prompt, sampling, TOKENS))
    assert tokens == list(written.token_ids)
    assert oracle.decode(tokens) == written.text


def test_the_example_names_addresses_that_are_swapped(
    draft_address: str, verifier_address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["orchestrator.py", verifier_address, draft_address, "317"])
    with pytest.raises(SystemExit) as caught:
        orchestrator.main()
    assert caught.value.code == 2
    assert f"{verifier_address} is no draft service" in capsys.readouterr().err


def call(channel: grpc.Channel, service: str, method: str, outbox: Outbox) -> Iterator[dict[str, Any]]:
    """Call a method whose messages reflection describes."""
    database = ProtoReflectionDescriptorDatabase(channel)
    assert service in database.get_services()
    described = descriptor_pool.DescriptorPool(database).FindServiceByName(service).FindMethodByName(method)
    request_type = message_factory.GetMessageClass(described.input_type)
    response_type = message_factory.GetMessageClass(described.output_type)
    stream = channel.stream_stream(
        f"/{service}/{method}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    requests = (json_format.ParseDict(message, request_type()) for message in iter(outbox.get, None))
    for response in stream(requests, timeout=60):
        yield json_format.MessageToDict(response)


def test_reflection_alone_suffices(draft_address: str, verifier_address: str, written: Completion) -> None:
    """No stub of ours is used."""
    prompt = list(written.started.prompt_token_ids)
    sampling = {"temperature": 0.8, "seed": str(SEED), "rule": "ACCEPTANCE_RULE_COUPLED"}
    opening: dict[str, Any] = {"promptTokenIds": prompt, "sampling": sampling}
    to_draft, to_verifier = Outbox(), Outbox()
    with grpc.insecure_channel(draft_address) as draft, grpc.insecure_channel(verifier_address) as verifier:
        drafts = call(draft, "outrider.v1.DraftService", "Propose", to_draft)
        verdicts = call(verifier, "outrider.v1.VerifierService", "Verify", to_verifier)
        to_draft.put({"sequenceId": "s", "open": opening})
        to_verifier.put({"sequenceId": "s", "open": opening | {"maxNewTokens": TOKENS}})
        tokens: list[int] = []
        committed: list[int] = []
        number, base, reason = 1, len(prompt), ""
        while not reason:
            advance = {"round": number, "baseLength": base, "committedTokenIds": committed, "gamma": 4}
            to_draft.put({"sequenceId": "s", "advance": advance})
            proposal = next(response["proposal"] for response in drafts if "proposal" in response)
            to_verifier.put({"sequenceId": "s", "proposal": proposal})
            verdict = next(response["verdict"] for response in verdicts if "verdict" in response)
            number, base, committed = number + 1, base + len(committed), verdict["tokenIds"]
            tokens += committed
            reason = verdict.get("finishReason", "")
        to_draft.put(None)
        to_verifier.put(None)
    assert reason in ("FINISH_REASON_LENGTH", "FINISH_REASON_STOP_TOKEN")
    assert tokens == list(written.token_ids)
