"""A client that runs the loop itself: it sends proposals of a draft service to a verifier, and verdicts back.

It needs only the public contract and gRPC. It has no tokenizer: prompt and text are token ids.

    python examples/orchestrator.py DRAFT_HOST:PORT VERIFIER_HOST:PORT 317 12 88
"""

import argparse
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
        self._responses = method(iter(self._outbox.get, None))

    def send(self, **kind: Any) -> None:
        self._outbox.put(self._request(sequence_id="orchestrated", **kind))

    def take(self, kind: str) -> Any:
        """The next response of this kind; others, such as notices, are skipped."""
        return next(getattr(response, kind) for response in self._responses if response.WhichOneof("kind") == kind)

    def close(self) -> None:
        self._outbox.put(None)
        self._responses.cancel()


def generate(
    draft: grpc.Channel,
    verifier: grpc.Channel,
    prompt: Sequence[int],
    sampling: sampling_pb2.SamplingParams,
    max_new_tokens: int,
) -> Iterator[int]:
    """Yields tokens as the target commits them. `sampling` must set seed and rule: both services need them."""
    drafts = Stream(DraftServiceStub(draft).Propose, draft_service_pb2.ProposeRequest)
    verdicts = Stream(VerifierServiceStub(verifier).Verify, verifier_service_pb2.VerifyRequest)
    try:
        drafts.send(open=draft_service_pb2.OpenDraft(prompt_token_ids=prompt, sampling=sampling))
        verdicts.send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=prompt, sampling=sampling, max_new_tokens=max_new_tokens
            )
        )
        number, base, committed, finished = 1, len(prompt), list[int](), False
        while not finished:
            drafts.send(
                advance={"round": number, "base_length": base, "committed_token_ids": committed, "gamma": GAMMA}
            )
            verdicts.send(proposal=drafts.take("proposal"))  # unchanged
            verdict = verdicts.take("verdict")
            number, base, committed = number + 1, base + len(committed), list(verdict.token_ids)
            finished = bool(verdict.finish_reason)
            yield from committed
    finally:
        drafts.close()
        verdicts.close()


def main() -> None:
    """Reads the addresses and the prompt from the command line."""
    parser = argparse.ArgumentParser(description="Generates 64 tokens from a draft service and a verifier.")
    parser.add_argument("draft", metavar="DRAFT_HOST:PORT")
    parser.add_argument("verifier", metavar="VERIFIER_HOST:PORT")
    parser.add_argument("prompt", metavar="TOKEN_ID", type=int, nargs="+", help="the prompt, as token ids")
    given = parser.parse_args()
    sampling = sampling_pb2.SamplingParams(temperature=0.8, seed=7, rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)
    try:
        with grpc.insecure_channel(given.draft) as draft, grpc.insecure_channel(given.verifier) as verifier:
            for token in generate(draft, verifier, given.prompt, sampling, max_new_tokens=64):
                print(token, end=" ", flush=True)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            parser.error(f"{given.draft} is no draft service, or {given.verifier} no verifier: swap the addresses?")
        raise SystemExit(f"{error.code().name}: {error.details()}") from None
    print()


if __name__ == "__main__":
    main()
