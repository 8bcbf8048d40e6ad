"""The loop in other hands: by `Propose` and `Verify` alone they write what `Generate` writes.

Once as the example does it, with the stubs; once as `grpcurl` would, with nothing but what the services tell of
themselves by reflection.
"""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from examples.orchestrator import generate, main
from outrider.client import Client, Completion
from protos.outrider.v1 import sampling_pb2
from tests.draft_service import oracle

PROMPT, SEED, TOKENS = "def read_lines(path):\n", 7, 48


@pytest.fixture(scope="module")
def written(draft_address: str) -> Completion:
    """What `Generate` writes."""
    with Client(draft_address) as client:
        return client.complete(PROMPT, temperature=0.8, seed=SEED, rule="coupled", max_new_tokens=TOKENS)


def test_the_example_writes_the_text_of_generate(
    draft_address: str, verifier_address: str, written: Completion
) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.8, seed=SEED, rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)
    prompt = written.started.prompt_token_ids
    with grpc.insecure_channel(draft_address) as draft, grpc.insecure_channel(verifier_address) as verifier:
        tokens = list(generate(draft, verifier, prompt, sampling, TOKENS))
    assert tokens == list(written.token_ids)
    assert oracle.decode(tokens) == written.text


class Reflected:
    """A service as reflection describes it: messages go in as JSON-like dictionaries, and come out so."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        database = ProtoReflectionDescriptorDatabase(channel)
        assert service in database.get_services()
        self._service = descriptor_pool.DescriptorPool(database).FindServiceByName(service)

    def stream(self, method: str, outbox: "SimpleQueue[dict[str, Any] | None]") -> Iterator[dict[str, Any]]:
        described = self._service.FindMethodByName(method)
        request_type, response_type = (
            message_factory.GetMessageClass(t) for t in (described.input_type, described.output_type)
        )
        call = self._channel.stream_stream(
            f"/{self._service.full_name}/{method}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        requests = (json_format.ParseDict(said, request_type()) for said in iter(outbox.get, None))
        for answer in call(requests, timeout=60):
            yield json_format.MessageToDict(answer)


def test_reflection_alone_suffices(draft_address: str, verifier_address: str, written: Completion) -> None:
    """No stub of ours is touched: descriptors come from the services, messages are made of them."""
    sampling = {"temperature": 0.8, "seed": str(SEED), "rule": "ACCEPTANCE_RULE_COUPLED"}
    prompt = list(written.started.prompt_token_ids)
    to_draft: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    to_verifier: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    with grpc.insecure_channel(draft_address) as draft, grpc.insecure_channel(verifier_address) as verifier:
        drafts = Reflected(draft, "outrider.v1.DraftService").stream("Propose", to_draft)
        verdicts = Reflected(verifier, "outrider.v1.VerifierService").stream("Verify", to_verifier)
        to_draft.put({"sequenceId": "s", "open": {"promptTokenIds": prompt, "sampling": sampling}})
        to_verifier.put(
            {"sequenceId": "s", "open": {"promptTokenIds": prompt, "sampling": sampling, "maxNewTokens": TOKENS}}
        )
        tokens: list[int] = []
        committed: list[int] = []
        number, base, reason = 1, len(prompt), ""
        while not reason:
            advance = {"round": number, "baseLength": base, "committedTokenIds": committed, "gamma": 4}
            to_draft.put({"sequenceId": "s", "advance": advance})
            proposal = next(answer["proposal"] for answer in drafts if "proposal" in answer)
            to_verifier.put({"sequenceId": "s", "proposal": proposal})
            verdict = next(answer["verdict"] for answer in verdicts if "verdict" in answer)
            number, base, committed = number + 1, base + len(committed), verdict["tokenIds"]
            tokens += committed
            reason = verdict.get("finishReason", "")
        to_draft.put(None)
        to_verifier.put(None)
    assert reason in ("FINISH_REASON_LENGTH", "FINISH_REASON_STOP_TOKEN")
    assert tokens == list(written.token_ids)


def test_without_arguments_the_example_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["orchestrator.py"])
    with pytest.raises(SystemExit):
        main()
    assert "DRAFT_HOST:PORT" in capsys.readouterr().err
