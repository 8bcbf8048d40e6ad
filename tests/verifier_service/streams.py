"""A Verify stream driven by hand: plain stubs, no service code."""

import queue
from typing import Any, Self

import grpc
import pytest

from outrider.rpc.errors import RequestError, from_rpc_error
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2 import VerifyRequest

TIMEOUT = 60.0
PROMPT = [5, 6, 7, 8]


def opening(
    prompt: list[int] | None = None,
    *,
    max_new_tokens: int = 16,
    temperature: float = 0.0,
    seed: int = 1,
    rule: sampling_pb2.AcceptanceRule = sampling_pb2.ACCEPTANCE_RULE_UNSPECIFIED,
    decode: verifier_service_pb2.Decode | None = None,
) -> verifier_service_pb2.OpenSequence:
    return verifier_service_pb2.OpenSequence(
        prompt_token_ids=PROMPT if prompt is None else prompt,
        max_new_tokens=max_new_tokens,
        ignore_eos=True,
        sampling=sampling_pb2.SamplingParams(temperature=temperature, seed=seed, rule=rule),
        decode=decode,
    )


def decode(number: int, prefix: list[int], tokens: int = 1, seen: int = 0) -> verifier_service_pb2.Decode:
    return verifier_service_pb2.Decode(
        round=number,
        base_length=len(prefix),
        prefix_hash=PrefixHash(prefix).digest(),
        num_tokens=tokens,
        seen_round=seen,
    )


def error_of(call: Any) -> RequestError:
    """The error that ends a call; reads all responses before it."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return from_rpc_error(caught.value)


class BidirectionalCall:
    """A call of a streaming method. It is cancelled at the end of a `with` block."""

    def __init__(self, method: Any, timeout: float = TIMEOUT) -> None:
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.call = method(iter(self._outbox.get, None), timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_sending()
        self.call.cancel()

    def close_sending(self) -> None:
        self._outbox.put(None)


class Stream(BidirectionalCall):
    """One call of `Verify`."""

    def __init__(self, channel: grpc.Channel, sequence_id: str = "s", timeout: float = TIMEOUT) -> None:
        self.sequence_id = sequence_id
        method: Any = channel.stream_stream(
            "/outrider.v1.VerifierService/Verify",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=verifier_service_pb2.VerifyResponse.FromString,
        )
        super().__init__(method, timeout)

    def send(self, message: VerifyRequest | bytes) -> None:
        """Send a message, or bytes that are not one."""
        self._outbox.put(message)

    def open(self, message: verifier_service_pb2.OpenSequence | None = None) -> None:
        self.send(VerifyRequest(sequence_id=self.sequence_id, open=message or opening()))

    def decode(self, number: int, prefix: list[int], tokens: int = 1, seen: int = 0) -> None:
        self.send(VerifyRequest(sequence_id=self.sequence_id, decode=decode(number, prefix, tokens, seen)))

    def propose(
        self, number: int, prefix: list[int], tokens: list[int], seen: int = 0, *, sends_distributions: bool = True
    ) -> None:
        """Propose tokens as point masses, or without distributions."""
        point = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
        proposal = speculation_pb2.Proposal(
            round=number,
            base_length=len(prefix),
            prefix_hash=PrefixHash(prefix).digest(),
            token_ids=tokens,
            distributions=[point] * len(tokens) if sends_distributions else [],
            seen_round=seen,
        )
        self.send(VerifyRequest(sequence_id=self.sequence_id, proposal=proposal))

    def take(self) -> verifier_service_pb2.VerifyResponse:
        """The next reply. Raises `grpc.RpcError` if the call failed, StopIteration if it ended."""
        response: verifier_service_pb2.VerifyResponse = next(self.call)
        return response

    def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict, past `Opened` and notices."""
        while True:
            reply = self.take()
            if reply.WhichOneof("kind") == "verdict":
                return reply.verdict
