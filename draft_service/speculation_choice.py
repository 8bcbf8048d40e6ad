"""Which policy a request gets: names of the contract to kinds and back, and what is refused."""

import math

from draft_service.speculation import PolicyKind
from outrider.rpc.errors import invalid_field
from protos.outrider.v1 import draft_service_pb2

POLICY_TO_WIRE = {
    PolicyKind.FIXED: draft_service_pb2.SPECULATION_POLICY_FIXED,
    PolicyKind.HEURISTIC: draft_service_pb2.SPECULATION_POLICY_HEURISTIC,
    PolicyKind.ADAPTIVE: draft_service_pb2.SPECULATION_POLICY_ADAPTIVE,
}
_KINDS = {number: kind for kind, number in POLICY_TO_WIRE.items()}


def check_policy(field: str, asked: draft_service_pb2.SpeculationParams, *, default: PolicyKind) -> PolicyKind:
    """What chooses the lengths: what is named; else `fixed` where γ is given, so that it holds; else the default.

    Raises:
        RequestError: INVALID_ARGUMENT: there is no such policy.
    """
    if not asked.policy:
        return PolicyKind.FIXED if asked.HasField("gamma") else default
    kind = _KINDS.get(asked.policy)
    if kind is None:
        names = ", ".join(f"{name} ({number})" for number, name in _KINDS.items())
        raise invalid_field(field, f"{field} is {asked.policy}; there are {names}", given=asked.policy, offered=names)
    return kind


def check_max_entropy(field: str, asked: draft_service_pb2.SpeculationParams, *, default: float | None) -> float | None:
    """The bound on a draft law's entropy in nats; None is no bound.

    Raises:
        RequestError: INVALID_ARGUMENT: it is negative, or no number.
    """
    if not asked.HasField("max_entropy"):
        return default
    if not asked.max_entropy >= 0:  # NaN neither
        raise invalid_field(field, f"{field} is {asked.max_entropy:g}; at least 0 (nats)", given=asked.max_entropy)
    return None if math.isinf(asked.max_entropy) else asked.max_entropy
