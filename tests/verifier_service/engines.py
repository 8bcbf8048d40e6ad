"""The verifier's engine without its thread, and sequences of it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.rpc.errors import RequestError
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.sampling import Sampling
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.engine import Close, Open, Submit, VerifierEngine
from verifier_service.request import Opening, Round
from verifier_service.sequence import Reply, TargetSequence, encoded

PROMPT = [11, 12, 13]
STOP = 99
VOCABULARY = 2000
PROMPTS = [[11, 12], [13, 14, 15], [16]]


def make(
    replies: list[Reply],
    *,
    prompt: Sequence[int] = PROMPT,
    committed: Sequence[int] = (),
    params: SamplingParams | None = None,
    rule: Rule = Rule.TOKENWISE,
    rules: LogitRules | None = None,
    seed: int = 1,
    max_new_tokens: int = 8,
    stop: int | None = STOP,
    **opening: Any,
) -> TargetSequence:
    """A sequence that appends its replies to `replies`."""
    rules = rules or LogitRules()
    opened = Opening(
        request_id="r",
        prompt=list(prompt),
        committed=list(committed),
        sampling=Sampling(params or SamplingParams(), rules, rule, lenience=1.0, seed=seed),
        seed=seed,
        logit_rules=rules,
        stop_token_ids=frozenset() if stop is None else frozenset({stop}),
        max_new_tokens=max_new_tokens,
        **{"top_logprobs": -1, "cache_salt": "", **opening},
    )
    return TargetSequence("s", opened, VOCABULARY, lambda reply: replies.append(encoded(reply)))


def a_round(number: int, prefix: Sequence[int], tokens: Sequence[int] = (), *, seen: int = 0, **fields: Any) -> Round:
    """A proposal of point masses, or with `decode` a Decode."""
    return Round(
        number=number,
        base_length=len(prefix),
        prefix_hash=PrefixHash(prefix).digest(),
        seen_round=seen,
        tokens=tuple(tokens),
        distributions=(None,) * len(tokens),
        **fields,
    )


def engine_of(loaded: LoadedModel, **how: Any) -> VerifierEngine:
    """An engine of four sequences, not started."""
    limits = model_pb2.Limits(max_gamma=4, max_sequences=4, max_sequence_tokens=64)
    engine = VerifierEngine(
        TorchRunner.build(loaded, max_sequences=4, max_length=64),
        model_pb2.ModelInfo(vocab_size=VOCABULARY, limits=limits),
        max_batch_tokens=64,
        verify_path="torch",
        **how,
    )
    engine.prepare()
    return engine


class Client:
    """A sequence of an engine, and its replies."""

    def __init__(self, engine: VerifierEngine, prompt: Sequence[int] = PROMPT, **opening: Any) -> None:
        self.replies: list[Reply] = []
        how: dict[str, Any] = {"params": SamplingParams(temperature=0), "stop": None, "max_new_tokens": 6, **opening}
        self.sequence = make(self.replies, prompt=prompt, **how)
        self._engine = engine
        engine.receive(Open(self.sequence))

    def submit(self, drafted: Sequence[int] = (7, 8), *, arrived: float | None = None, decode: int = 0) -> None:
        """Submit the next round: a proposal, or a `Decode` of so many tokens."""
        sequence, at = self.sequence, time.perf_counter() if arrived is None else arrived
        number, drafted = sequence.last_round, () if decode else drafted
        own = a_round(number + 1, sequence.tokens, drafted, seen=number, arrived=at, decode=decode)
        self._engine.receive(Submit(sequence, own))

    def close(self) -> None:
        self._engine.receive(Close(self.sequence))

    @property
    def error(self) -> RequestError | None:
        return next((reply for reply in self.replies if isinstance(reply, RequestError)), None)

    def _messages(self) -> list[verifier_service_pb2.VerifyResponse]:
        return [reply for reply in self.replies if isinstance(reply, verifier_service_pb2.VerifyResponse)]

    @property
    def verdicts(self) -> list[speculation_pb2.Verdict]:
        return [reply.verdict for reply in self._messages() if reply.HasField("verdict")]

    @property
    def notices(self) -> list[verifier_service_pb2.Notice]:
        return [reply.notice for reply in self._messages() if reply.HasField("notice")]


def run(engine: VerifierEngine, clients: Sequence[Client]) -> list[list[int]]:
    """Send rounds and take turns until all sequences end, then close them. Return the output of each."""
    for _ in range(1000):
        for client in clients:
            client.sequence.num_written = client.sequence.num_replies  # the client reads at once
            if not client.sequence.finished and not client.sequence.rounds:
                client.submit()
        if all(client.sequence.finished for client in clients):
            break
        engine.run_once()
    assert all(client.sequence.finished for client in clients)
    for client in clients:
        client.close()
    assert engine.model_runner.pool.used_blocks == 0
    engine.model_runner.pool.check_integrity()
    return [client.sequence.tokens[len(client.sequence.opening.prompt) :] for client in clients]


def break_forward(engine: VerifierEngine, breaks: Callable[[], bool]) -> None:
    """Make forward passes raise while `breaks()` is true."""
    forward = engine.model_runner.forward

    def broken(chunks: Sequence[Chunk], **named: Any) -> Any:
        if breaks():
            raise RuntimeError("a pass")
        return forward(chunks, **named)

    engine.model_runner.forward = broken  # type: ignore[method-assign]
