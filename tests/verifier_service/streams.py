"""A Verify stream driven by hand, for tests: plain stubs, no service code."""

import queue
from collections.abc import Iterator
from typing import Any, Self

import grpc

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
) -> verifier_service_pb2.OpenSequence:
    return verifier_service_pb2.OpenSequence(
        prompt_token_ids=PROMPT if prompt is None else prompt,
        max_new_tokens=max_new_tokens,
        ignore_eos=True,
        sampling=sampling_pb2.SamplingParams(temperature=temperature, seed=seed, rule=rule),
    )


class Stream:
    """One call of `Verify`; `with` it, `send` messages and `take` replies."""

    def __init__(self, channel: grpc.Channel, sequence_id: str = "s", timeout: float = TIMEOUT) -> None:
        self.sequence_id = sequence_id
        self._outbox: queue.SimpleQueue[VerifyRequest | bytes | None] = queue.SimpleQueue()
        method: Any = channel.stream_stream(
            "/outrider.v1.VerifierService/Verify",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=verifier_service_pb2.VerifyResponse.FromString,
        )
        self.call = method(self._requests(), timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.put(None)
        self.call.cancel()

    def _requests(self) -> Iterator[VerifyRequest | bytes]:
        while (message := self._outbox.get()) is not None:
            yield message

    def send(self, message: VerifyRequest | bytes) -> None:
        """Sends a message, or bytes that are none."""
        self._outbox.put(message)

    def close_sending(self) -> None:
        self._outbox.put(None)

    def open(self, message: verifier_service_pb2.OpenSequence | None = None) -> None:
        self.send(VerifyRequest(sequence_id=self.sequence_id, open=message or opening()))

    def decode(self, number: int, prefix: list[int], tokens: int = 1, seen: int = 0) -> None:
        self.send(
            VerifyRequest(
                sequence_id=self.sequence_id,
                decode=verifier_service_pb2.Decode(
                    round=number,
                    base_length=len(prefix),
                    prefix_hash=PrefixHash(prefix).digest(),
                    num_tokens=tokens,
                    seen_round=seen,
                ),
            )
        )

    def propose(
        self, number: int, prefix: list[int], tokens: list[int], seen: int = 0, *, sends_distributions: bool = True
    ) -> None:
        """Proposes tokens as point masses, or without distributions."""
        point = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
        self.send(
            VerifyRequest(
                sequence_id=self.sequence_id,
                proposal=speculation_pb2.Proposal(
                    round=number,
                    base_length=len(prefix),
                    prefix_hash=PrefixHash(prefix).digest(),
                    token_ids=tokens,
                    distributions=[point] * len(tokens) if sends_distributions else [],
                    seen_round=seen,
                ),
            )
        )

    def take(self) -> verifier_service_pb2.VerifyResponse:
        """The next reply. Raises `grpc.RpcError` where the call failed, StopIteration where it ended."""
        return next(self.call)

    def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict, past `Opened` and notices."""
        while True:
            reply = self.take()
            if reply.WhichOneof("kind") == "verdict":
                return reply.verdict
