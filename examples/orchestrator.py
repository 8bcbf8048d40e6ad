"""A third party that drives the loop itself: proposals from one service, verdicts from another, in between it decides.

It stands on the public contract and gRPC alone: no tokenizer, so prompt and text are token ids.

    python examples/orchestrator.py DRAFT_HOST:PORT VERIFIER_HOST:PORT 317 12 88
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc

from protos.outrider.v1 import draft_service_pb2, sampling_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

GAMMA = 4


class Stream:
    """One stream, which is one sequence, at either service."""

    def __init__(self, method: Callable[..., Any], request: type) -> None:
        self._request = request
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._answers = method(iter(self._outbox.get, None))

    def send(self, **kind: Any) -> None:
        self._outbox.put(self._request(sequence_id="orchestrated", **kind))

    def take(self, kind: str) -> Any:
        """The next answer of this kind; notices, among others, are passed over."""
        return next(getattr(answer, kind) for answer in self._answers if answer.WhichOneof("kind") == kind)

    def close(self) -> None:
        self._outbox.put(None)
        self._answers.cancel()


def generate(
    draft: grpc.Channel,
    verifier: grpc.Channel,
    prompt: Sequence[int],
    sampling: sampling_pb2.SamplingParams,
    max_new_tokens: int,
) -> Iterator[int]:
    """Yields tokens as the target commits them. `sampling` names the seed and the rule: both services need both."""
    drafts = Stream(DraftServiceStub(draft).Propose, draft_service_pb2.ProposeRequest)
    judge = Stream(VerifierServiceStub(verifier).Verify, verifier_service_pb2.VerifyRequest)
    try:
        drafts.send(open=draft_service_pb2.OpenDraft(prompt_token_ids=prompt, sampling=sampling))
        judge.send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=prompt, sampling=sampling, max_new_tokens=max_new_tokens
            )
        )
        number, base, committed, finished = 1, len(prompt), list[int](), False
        while not finished:
            drafts.send(
                advance={"round": number, "base_length": base, "committed_token_ids": committed, "gamma": GAMMA}
            )
            judge.send(proposal=drafts.take("proposal"))  # as it is
            verdict = judge.take("verdict")
            number, base, committed = number + 1, base + len(committed), list(verdict.token_ids)
            finished = bool(verdict.finish_reason)
            yield from committed
    finally:
        drafts.close()
        judge.close()


if __name__ == "__main__":
    law = sampling_pb2.SamplingParams(temperature=0.8, seed=7, rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)
    with grpc.insecure_channel(sys.argv[1]) as draft, grpc.insecure_channel(sys.argv[2]) as verifier:
        for token in generate(draft, verifier, [int(word) for word in sys.argv[3:]], law, max_new_tokens=64):
            print(token, end=" ", flush=True)
