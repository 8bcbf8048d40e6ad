"""Which drafter a request gets: names of the contract to kinds and back, and what is refused."""

from collections.abc import Collection

from draft_service.drafters.base import HAVE_LOGITS, Kind
from outrider.rpc.errors import invalid_field
from outrider.service.sampling import Sampling, check_temperature
from protos.outrider.v1 import draft_service_pb2

KIND_TO_WIRE = {
    Kind.MODEL: draft_service_pb2.DRAFTER_MODEL,
    Kind.NGRAM: draft_service_pb2.DRAFTER_NGRAM,
    Kind.LOOKUP: draft_service_pb2.DRAFTER_LOOKUP,
    Kind.RANDOM: draft_service_pb2.DRAFTER_RANDOM,
    Kind.NONE: draft_service_pb2.DRAFTER_NONE,
    Kind.STAGED: draft_service_pb2.DRAFTER_STAGED,
}
_KINDS = {number: kind for kind, number in KIND_TO_WIRE.items()}


def check_drafter(
    field: str, asked: draft_service_pb2.Drafter, sampling: Sampling, *, offered: Collection[Kind], default: Kind
) -> Kind:
    """What drafts for a request; `default` where it does not say.

    Raises:
        RequestError: INVALID_ARGUMENT: this service does not have it, or the rule does not go with it.
    """
    kind = _KINDS.get(asked) if asked else default
    if kind is None or kind not in offered:
        name = kind.value if kind else asked
        names = ", ".join(sorted(offered))
        raise invalid_field(field, f"{field} is {name}; this service offers {names}", given=name, offered=names)
    _check_rule(kind, sampling)
    return kind


def _check_rule(kind: Kind, sampling: Sampling) -> None:
    if sampling.needs_logits and kind not in HAVE_LOGITS:
        raise invalid_field(
            "sampling.rule",
            f"sampling.rule is sigmoid, which asks for the logits of a draft model; the drafter {kind.value} has none",
            given=sampling.rule.value,
            drafter=kind.value,
        )


def check_draft_temperature(
    field: str, asked: float | None, sampling: Sampling, *, default: float | None
) -> float | None:
    """The temperature that is drafted by; None is the target's. A default that the rule refuses is left out.

    Raises:
        RequestError: INVALID_ARGUMENT: it is outside its range, or 0 where the rule divides logits by it.
    """
    if asked is None:
        return None if default == 0 and sampling.needs_logits else default
    check_temperature(field, asked)
    if asked == 0 and sampling.needs_logits:
        raise invalid_field(field, f"{field} is 0; under the rule sigmoid it must be above 0", given=asked)
    return asked


def supports_rule_by_logits(offered: Collection[Kind]) -> bool:
    """Whether some drafter that proposes anything goes with the rule `sigmoid`."""
    return bool(HAVE_LOGITS.intersection(offered) - {Kind.NONE})
