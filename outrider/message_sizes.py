"""How large messages become, by what a model and the limits of a service allow: what a server takes by default."""

from outrider.padding import largest
from outrider.sampling import MAX_TOKEN_LIST, MAX_TOP_LOGPROBS
from outrider.wire import HASH_BYTES, bytes_with_logits
from protos.outrider.v1 import draft_service_pb2, verifier_service_pb2

LEAST_LIMIT = 4 << 20
"""Bytes; gRPC's own default, so that no server of ours takes less than others do unless it is told to."""

# Text of a prompt: tokens of four bytes are common, and few texts have longer ones throughout.
BYTES_OF_PROMPT_TOKEN = 16
# Names, texts of notices, and whatever a newer contract adds.
_TEXT = 512
_SLACK = 4096


def limit_of(*sizes: int) -> int:
    """What a server takes that has to take messages of these sizes, in bytes."""
    return max(LEAST_LIMIT, *(size + _SLACK for size in sizes))


def of_verify(
    *, sequence_tokens: int, max_gamma: int, max_support: int, vocab_size: int | None, max_stop_token_ids: int
) -> int:
    """The largest message on a `Verify` stream, in bytes: an opening, a proposal, with sparse laws or with a draft's
    logits, or a verdict with log-probabilities. `vocab_size` is V; None: no logits travel.
    """
    lists = {"banned_token_ids": MAX_TOKEN_LIST, "logit_bias": MAX_TOKEN_LIST, "stop_token_ids": max_stop_token_ids}
    asked = {
        **lists,
        "prompt_token_ids": sequence_tokens,  # with the committed ones together
        "committed_token_ids": 0,
        "required_features": 32,
        "prefix_hash": HASH_BYTES,
        "Proposal.token_ids": max_gamma,
        "distributions": max_gamma,
        "SparseDistribution.token_ids": 4 * max_support,
        "weights": 2 * max_support,
        "values": 0,
    }
    told = {"Verdict.token_ids": max_gamma + 1, "beta": max_gamma, "logprobs": max_gamma + 1, "top": MAX_TOP_LOGPROBS}
    return max(
        largest(verifier_service_pb2.VerifyRequest.DESCRIPTOR, counts=asked, most=_TEXT),
        largest(verifier_service_pb2.VerifyResponse.DESCRIPTOR, counts=told, most=_TEXT),
        0 if vocab_size is None else bytes_with_logits(max_gamma, vocab_size),
    )


def of_generate(*, sequence_tokens: int, max_stop_token_ids: int, max_stop_strings: int, max_stop_chars: int) -> int:
    """The largest request for text, in bytes, with a prompt as long as a sequence may be."""
    prompt = BYTES_OF_PROMPT_TOKEN * sequence_tokens
    counts = {
        "GenerateRequest.text": prompt,
        "ids": sequence_tokens,
        "messages": 1,
        "role": _TEXT,
        "content": prompt,
        "committed_token_ids": sequence_tokens,
        "banned_token_ids": MAX_TOKEN_LIST,
        "logit_bias": MAX_TOKEN_LIST,
        "stop_token_ids": max_stop_token_ids,
        "stop": 0,
        "required_features": 32,
    }
    request = largest(draft_service_pb2.GenerateRequest.DESCRIPTOR, counts=counts, most=_TEXT)
    return request + max_stop_strings * (4 * max_stop_chars + 4)
