"""Calls of `Generate` and `Propose` as a client makes them: plain stubs, no service code."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.verifier_service.streams import TIMEOUT, BidirectionalCall

PROMPT = "def read_lines(path, encoding=None):\n"

TOKENWISE, BLOCK, COUPLED = (
    sampling_pb2.ACCEPTANCE_RULE_TOKENWISE,
    sampling_pb2.ACCEPTANCE_RULE_BLOCK,
    sampling_pb2.ACCEPTANCE_RULE_COUPLED,
)


def sampling(temperature: float = 0.0, **fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=temperature, **fields)


def request(
    prompt: str | list[int] = PROMPT, *, temperature: float = 0.0, gamma: int | None = None, **fields: Any
) -> draft_service_pb2.GenerateRequest:
    """A request with some defaults. `sampling` and `speculation` replace them."""
    fields.setdefault("sampling", sampling(temperature, seed=1, rule=TOKENWISE))
    if gamma is not None:
        fields.setdefault("speculation", draft_service_pb2.SpeculationParams(gamma=gamma))
    if "chat" not in fields:
        if isinstance(prompt, str):
            fields["text"] = prompt
        else:
            fields["token_ids"] = draft_service_pb2.TokenIds(ids=prompt)
    return draft_service_pb2.GenerateRequest(**fields)


@dataclass
class Sample:
    """One sample: its chunks joined. `finish` removes tokens that a stop string cuts."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[sampling_pb2.PositionLogprobs] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    rounds: list[draft_service_pb2.RoundReport] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # of each chunk
    finished: draft_service_pb2.GenerateFinished | None = None

    def add(self, chunk: draft_service_pb2.GenerateChunk) -> None:
        self.text += chunk.text
        self.ids += chunk.token_ids
        self.origins += chunk.origins
        self.logprobs += chunk.logprobs
        self.token_texts += chunk.token_texts
        self.rounds += chunk.rounds
        self.held.append(chunk.held_tokens)

    def finish(self, finished: draft_service_pb2.GenerateFinished) -> None:
        self.finished = finished
        if finished.cut_tokens:
            for sent in (self.ids, self.origins, self.logprobs, self.token_texts):
                del sent[-finished.cut_tokens :]

    @property
    def end(self) -> draft_service_pb2.GenerateFinished:
        assert self.finished is not None
        return self.finished

    @property
    def reason(self) -> str:
        return sampling_pb2.FinishReason.Name(self.end.finish_reason).removeprefix("FINISH_REASON_")


@dataclass
class Result:
    """A whole call."""

    started: draft_service_pb2.GenerateStarted
    samples: list[Sample]


def generate(
    channel: grpc.Channel, message: draft_service_pb2.GenerateRequest, timeout: float | None = TIMEOUT
) -> Result:
    """Call and read to the end. The first response must be `started`."""
    call = DraftServiceStub(channel).Generate(message, timeout=timeout)
    return result_of(each for response in call for each in response.joined or [response])


def result_of(responses: Iterator[draft_service_pb2.GenerateResponse]) -> Result:
    first = next(response for response in responses if response.WhichOneof("event"))
    assert first.WhichOneof("event") == "started"
    samples: dict[int, Sample] = {}
    for response in responses:
        if response.WhichOneof("event") == "chunk":
            sample = samples.setdefault(response.chunk.index, Sample())
            assert sample.finished is None, "a chunk after the end of its sample"
            sample.add(response.chunk)
        elif response.WhichOneof("event"):  # a heartbeat has none
            assert response.WhichOneof("event") == "finished"
            samples.setdefault(response.finished.index, Sample()).finish(response.finished)
    assert all(sample.finished for sample in samples.values())
    return Result(first.started, [samples[index] for index in sorted(samples)])


def write(channel: grpc.Channel, *arguments: Any, **fields: Any) -> Sample:
    """The one sample of a request."""
    (sample,) = generate(channel, request(*arguments, **fields)).samples
    return sample


class ProposeStream(BidirectionalCall):
    """One call of `Propose`."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(DraftServiceStub(channel).Propose)

    def send(self, sequence_id: str = "s", **kind: Any) -> None:
        self._outbox.put(draft_service_pb2.ProposeRequest(sequence_id=sequence_id, **kind))

    def open(self, prompt: list[int], **fields: Any) -> None:
        fields.setdefault("sampling", sampling(1.0, seed=1))
        self.send(open=draft_service_pb2.OpenDraft(prompt_token_ids=prompt, **fields))

    def advance(self, number: int, base: int, committed: list[int], gamma: int = 4) -> None:
        fields: dict[str, Any] = {"round": number, "base_length": base, "committed_token_ids": committed}
        self.send(advance=draft_service_pb2.Advance(gamma=gamma, **fields))

    def take(self) -> draft_service_pb2.ProposeResponse:
        """The next response, past positions in the queue."""
        response: draft_service_pb2.ProposeResponse = next(
            response for response in self.call if not response.HasField("queue_position")
        )
        return response
