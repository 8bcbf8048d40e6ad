"""What a request asks to hide from who watches the wire, as checked numbers: sizes of messages, and their pace.

The leak: the tokens that a round commits show in the sizes and the times of packets (Wei et al., 2411.01076).
"""

from dataclasses import dataclass

from kernels.verify import Rule
from outrider.rpc.errors import invalid_field
from outrider.service.sampling import Sampling
from outrider.service.wire import HASH_BYTES, bytes_with_logits, largest
from protos.outrider.v1 import draft_service_pb2, model_pb2, verifier_service_pb2

MAX_FRAME_BYTES = 65_536
MIN_PACE_S, MAX_PACE_S = 0.001, 10.0

_SLACK = 16  # so that padding to the size is always possible
_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, slots=True)
class Emission:
    """How responses leave.

    Attributes:
        frame_bytes: the size of each; 0 where it does not matter.
        token_bytes: what the largest that brings one token and no text takes, padding that fills a gap included.
        pace: seconds from one to the next; None where they leave at once.
    """

    frame_bytes: int
    token_bytes: int
    pace: float | None


@dataclass(frozen=True, slots=True)
class RoundSizes:
    """Bytes of every message to the verifier, the opening aside, and from it; 0 and 0 where they do not matter."""

    request: int = 0
    response: int = 0


def check_emission(
    message: draft_service_pb2.GenerateRequest, *, max_gamma: int, top_logprobs: int | None
) -> Emission | None:
    """What a request says of its responses; None where it says nothing.

    Raises:
        RequestError: INVALID_ARGUMENT naming the field and the numbers.
    """
    if not message.HasField("emission"):
        return None
    asked = message.emission
    if not asked.frame_bytes and not asked.HasField("pace"):
        raise invalid_field("emission", "emission is empty; give frame_bytes, pace or both")
    if message.speculation.report_rounds:
        raise invalid_field(
            "speculation.report_rounds", "speculation.report_rounds tells what emission is to hide; give one of them"
        )
    least = least_frame_bytes(message, max_gamma=max_gamma, top_logprobs=top_logprobs)
    if asked.frame_bytes and not least <= asked.frame_bytes <= MAX_FRAME_BYTES:
        raise invalid_field(
            "emission.frame_bytes",
            f"emission.frame_bytes is {asked.frame_bytes}; {least}, which is what the largest response of this request "
            f"may take, to {MAX_FRAME_BYTES}",
            given=asked.frame_bytes,
            minimum=least,
            maximum=MAX_FRAME_BYTES,
        )
    pace = asked.pace.seconds + asked.pace.nanos / 1e9 if asked.HasField("pace") else None
    if pace is not None and not MIN_PACE_S <= pace <= MAX_PACE_S:
        raise invalid_field(
            "emission.pace",
            f"emission.pace is {pace:g} s; {MIN_PACE_S:g} to {MAX_PACE_S:g} s",
            given=pace,
            minimum=MIN_PACE_S,
            maximum=MAX_PACE_S,
        )
    return Emission(asked.frame_bytes, _token_bytes(top_logprobs) + _SLACK, pace)


def least_frame_bytes(message: draft_service_pb2.GenerateRequest, *, max_gamma: int, top_logprobs: int | None) -> int:
    """What a frame holds at least: the end of a sample, or a token by itself with a character of its text."""
    stop = max((len(each.encode()) for each in message.stop), default=0)
    counts = {**_counts(top_logprobs), "started": 0, "text": _CHARACTER, "stop": stop}
    return largest(draft_service_pb2.GenerateResponse.DESCRIPTOR, counts=counts, most=max_gamma) + _SLACK


def _token_bytes(top_logprobs: int | None) -> int:
    counts = {**_counts(top_logprobs), "started": 0, "finished": 0, "text": 0}
    return largest(draft_service_pb2.GenerateResponse.DESCRIPTOR, counts=counts, most=0)


def _counts(top_logprobs: int | None) -> dict[str, int]:
    """What a chunk with one token repeats."""
    return {
        "token_ids": 1,
        "origins": 1,
        "token_texts": 0,
        "rounds": 0,
        "logprobs": 0 if top_logprobs is None else 1,
        "top": top_logprobs or 0,
    }


def round_sizes(
    message: draft_service_pb2.GenerateRequest,
    sampling: Sampling,
    *,
    gamma: int,
    name_bytes: int,
    max_support: int,
    target: model_pb2.ModelInfo,
    top_logprobs: int | None,
) -> RoundSizes:
    """The sizes of the messages about a request's rounds. `name_bytes` is the length of the sequence's name."""
    if not message.speculation.fixed_size:
        return RoundSizes()
    if sampling.needs_logits:
        request = bytes_with_logits(gamma, target.vocab_size)
    else:
        # Greedy proposals carry point masses, and coupled ones nothing.
        support = 0 if sampling.law.is_greedy or sampling.rule is Rule.COUPLED else max_support
        asked = {
            "open": 0,
            "sequence_id": name_bytes,
            "prefix_hash": HASH_BYTES,
            "token_ids": gamma,
            "distributions": gamma,
            "SparseDistribution.token_ids": 4 * support,
            "weights": 2 * support,
            "values": 0,
        }
        request = largest(verifier_service_pb2.VerifyRequest.DESCRIPTOR, counts=asked, most=16)
    counts = {
        "opened": 1,
        "sequence_id": name_bytes,
        "token_ids": gamma + 1,
        "beta": gamma,
        "logprobs": 0 if top_logprobs is None else gamma + 1,
        "top": top_logprobs or 0,
        "rules": len(target.rules),
        "weights_fingerprint": len(target.weights_fingerprint.encode()),
        "message": 64,
    }
    response = largest(verifier_service_pb2.VerifyResponse.DESCRIPTOR, counts=counts, most=16)
    return RoundSizes(request + _SLACK, max(response + _SLACK, 256))
