"""Calls of vLLM's contract with a client of its own stubs, and the pair of services that the tests call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from outrider.cli.processes import Pair
from tests.cluster import Cluster, Service, wait_healthy
from tests.verifier_service.streams import TIMEOUT

FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"
VERIFIER_SEQUENCES, CLIENT_SEQUENCES = 2, 5
MESSAGE_BYTES = 1 << 16


class _WithToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds a bearer token to each call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_stream = intercept_unary_unary  # type: ignore[assignment]  # the stubs type their calls apart


@contextmanager
def channel_of(draft: Service, token: str = FIRST) -> Iterator[grpc.Channel]:
    """A channel whose calls have this token."""
    with grpc.insecure_channel(draft.address) as channel:
        yield grpc.intercept_channel(channel, _WithToken(token))


@contextmanager
def started_vllm_pair(folder: Path) -> Iterator[Pair]:
    """The demo pair with vLLM's contract and metrics; callers need a token. The verifier runs few sequences."""
    (folder / "tokens").write_text(f"{FIRST}\n{SECOND}\n", encoding="ascii")
    with Cluster("--vllm-metrics") as cluster:
        verifier = cluster.verifier(flags=f"--max-sequences {VERIFIER_SEQUENCES}")
        limits = f"--max-client-sequences {CLIENT_SEQUENCES} --max-stop-strings 3 --max-message-bytes {MESSAGE_BYTES}"
        limits += f" --auth-token-file {folder / 'tokens'}"
        draft = cluster.draft(verifier, flags=f"--vllm-grpc --speculation fixed {limits}")
        wait_healthy(verifier, draft)
        yield Pair(verifier, draft)


def request(prompt: list[int], *, stream: bool = False, request_id: str = "", **params: Any) -> Any:
    """A request; the prompt as tokens."""
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=prompt),
        sampling_params=vllm.SamplingParams(**params),
        stream=stream,
    )


@dataclass
class Output:
    """One sample: the chunks of its stream joined, and its end."""

    chunks: list[Any] = field(default_factory=list)
    complete: Any = None

    @property
    def ids(self) -> list[int]:
        return list(self.complete.output_ids)

    @property
    def streamed(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    def streamed_logprobs(self) -> Any:
        joined = vllm.OutputLogProbs()
        for chunk in self.chunks:
            joined.MergeFrom(chunk.output_logprobs)
        return joined


def collect(call: Any) -> list[Output]:
    """Read a call to its end. Return the samples by index."""
    outputs: dict[int, Output] = {}
    for response in call:
        kind = response.WhichOneof("response")
        part = getattr(response, kind)
        output = outputs.setdefault(part.index, Output())
        assert output.complete is None, "a response after the end of its sample"
        if kind == "chunk":
            output.chunks.append(part)
        else:
            output.complete = part
    assert all(output.complete is not None for output in outputs.values())
    return [outputs[index] for index in sorted(outputs)]


def stub(channel: grpc.Channel) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def generate(channel: grpc.Channel, *arguments: Any, **fields: Any) -> list[Output]:
    return collect(stub(channel).Generate(request(*arguments, **fields), timeout=TIMEOUT))


def one(channel: grpc.Channel, *arguments: Any, **fields: Any) -> Output:
    """The one sample of a request."""
    (output,) = generate(channel, *arguments, **fields)
    return output
