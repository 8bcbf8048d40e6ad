"""How a sequence is lost to its verifier, as the errors of its stream tell: which of them another verifier may mend."""

from enum import StrEnum

import grpc

from draft_service.verify_sequence import SILENT
from outrider.rpc.errors import RequestError


class Loss(StrEnum):
    """Why a sequence goes to another verifier."""

    DIED = "died"  # or cannot be reached: nobody can tell the two apart
    SILENT = "silent"
    DRAINING = "draining"
    REFUSED = "refused"  # it has no room, or others need that of a sequence which was idle
    STEP_FAILED = "step_failed"  # with this sequence, in a batch and alone
    MISMATCHED = "mismatched"  # it runs another model by now


def loss_of(error: RequestError) -> Loss | None:
    """What an error of a stream means; None where it is the request's own, which any verifier would answer alike."""
    match error.code, error.reason:
        case grpc.StatusCode.UNAVAILABLE, "DRAINING":
            return Loss.DRAINING
        case grpc.StatusCode.UNAVAILABLE, _:
            return Loss.SILENT if SILENT in error.metadata else Loss.DIED
        case (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED" | "IDLE") | (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE"):
            return Loss.REFUSED
        case grpc.StatusCode.INTERNAL, "STEP_FAILED":
            return Loss.STEP_FAILED
        case grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH":
            return Loss.MISMATCHED
        case _:
            return None
