"""A sequence of the verifier's own, through the engine as any other: before it, nobody is told that it serves."""

import asyncio

from kernels.verify import Rule
from outrider.rpc.errors import RequestError, internal
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.engine import Close, Open, Submit, VerifierEngine
from verifier_service.rounds import check_decode, check_open, check_proposal
from verifier_service.sequence import Reply, TargetSequence

# How often it is seen whether the engine still runs.
GLANCE_SECONDS = 0.5
PROMPT_TOKENS = 2
_NAME = "warm-up"


async def warm_up(engine: VerifierEngine, model: model_pb2.ModelInfo) -> None:
    """Has a proposal judged, and then a token written, on an engine that has started.

    Raises:
        RequestError: no verdict came: the pass failed, its logits were no numbers, or the engine has ended.
    """
    loop = asyncio.get_running_loop()
    replies: asyncio.Queue[Reply] = asyncio.Queue()

    def deliver(reply: Reply) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(replies.put_nowait, reply)

    most = model.limits.max_sequence_tokens
    prompt = [0] * max(1, min(PROMPT_TOKENS, most - 2))
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=prompt,
        max_new_tokens=min(model.limits.max_gamma + 2, most - len(prompt)),
        ignore_eos=True,
        request_id=_NAME,
        cache_salt=_NAME,
    )
    opening.sampling.seed = 0
    opening.sampling.rule = sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
    sequence = TargetSequence(_NAME, check_open(opening, model), model.vocab_size, deliver)
    engine.post(Open(sequence))
    try:
        if opening.max_new_tokens > 1:
            drafted = [0] * min(model.limits.max_gamma, opening.max_new_tokens - 1)
            point = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
            proposal = speculation_pb2.Proposal(
                round=1,
                base_length=len(prompt),
                prefix_hash=PrefixHash(prompt).digest(),
                token_ids=drafted,
                distributions=[point] * len(drafted),
            )
            engine.post(Submit(sequence, check_proposal(proposal, model, rule=Rule.TOKENWISE)))
            verdict = await _verdict(engine, replies)
            if verdict.finish_reason:
                return
            prompt += verdict.token_ids
        decode = verifier_service_pb2.Decode(
            round=2,
            base_length=len(prompt),
            prefix_hash=PrefixHash(prompt).digest(),
            num_tokens=1,
            seen_round=1,
        )
        engine.post(Submit(sequence, check_decode(decode)))
        await _verdict(engine, replies)
    finally:
        engine.post(Close(sequence))


async def _verdict(engine: VerifierEngine, replies: asyncio.Queue[Reply]) -> speculation_pb2.Verdict:
    """The next verdict, past notices."""
    while True:
        try:
            async with asyncio.timeout(GLANCE_SECONDS):
                reply = await replies.get()
        except TimeoutError:
            if not engine.alive:
                raise internal("INTERNAL", "the engine has ended before its first pass") from None
            continue
        if isinstance(reply, RequestError):
            raise internal(reply.reason, f"the first pass of the target failed: {reply.message}")
        if reply is None:
            raise internal("INTERNAL", "the first pass of the target failed: it ended without a verdict")
        if reply.WhichOneof("kind") == "verdict":
            return reply.verdict
