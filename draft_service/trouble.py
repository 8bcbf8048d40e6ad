"""The verifiers that failed a sequence: which ones it avoids for now, and when it gives up."""

import math
import time
from dataclasses import dataclass, field

import grpc

from draft_service.losses import Loss
from draft_service.replica import Replica
from outrider.rpc.errors import RequestError, unavailable

# Verifiers that a sequence may lose in one round.
MOST_LOST_IN_A_ROUND = 4
# Verifiers whose step may fail with a round, or whose process may end while it runs it: then the round is refused.
MOST_FAILED_IN_A_ROUND = 2
# One that did not answer a sequence in good time, which could stay where it was, is not asked by it again for so long.
MUTE_SECONDS = 10.0


@dataclass(slots=True)
class Trouble:
    """From the loss of a verifier until the next verdict.

    Attributes:
        error: the last one; None where there is no trouble.
        loss: what it means.
        lost: verifiers that had taken the sequence, and were lost.
        failed: those among them whose step failed with it, or whose process ended while running it.
        step_error: what a verifier has said of a step that failed.
        avoid: replicas that have refused it, and until when, by `time.monotonic()`.
        mute: replicas that it would have moved to, and until when they are left alone. They are no trouble yet, and
            outlast it.
    """

    error: RequestError | None = None
    loss: Loss = Loss.DIED
    lost: int = 0
    failed: list[Replica] = field(default_factory=list)
    step_error: RequestError | None = None
    avoid: dict[Replica, float] = field(default_factory=dict)
    mute: dict[Replica, float] = field(default_factory=dict)

    def met(self, replica: Replica, loss: Loss, error: RequestError, *, had_taken: bool, was_running: bool) -> None:
        """A verifier has failed the sequence; `had_taken` is whether it had opened it, and `was_running` whether it was
        running its prompt or its round.

        Raises:
            RequestError: where one more is not to be tried: the error, or INTERNAL (STEP_FAILED).
        """
        self.error, self.loss = error, loss
        if loss is Loss.STEP_FAILED:
            self.step_error = error
            self.avoid[replica] = math.inf
        if loss is Loss.STEP_FAILED or (loss is Loss.DIED and was_running):
            self.failed.append(replica)
        if len(self.failed) >= MOST_FAILED_IN_A_ROUND:
            names = " and ".join(each.address for each in self.failed)
            raise RequestError(
                grpc.StatusCode.INTERNAL,
                "STEP_FAILED",
                f"a round of this request failed at {len(self.failed)} verifiers, {names}, and is "
                f"not sent to another one: {error.message}",
            )
        if loss is Loss.REFUSED and error.retry_after is not None:
            self.avoid[replica] = time.monotonic() + error.retry_after
        self.lost += had_taken
        if had_taken and self.lost >= MOST_LOST_IN_A_ROUND:
            raise error

    def did_not_answer(self, replica: Replica) -> None:
        """A verifier that the sequence would have moved to was silent for too long."""
        self.mute[replica] = time.monotonic() + MUTE_SECONDS

    def over(self) -> "Trouble":
        """What is left of it after a verdict."""
        return Trouble(mute=self.mute)

    @property
    def is_suspect(self) -> bool:
        """Whether the sequence may be what its verifier failed at."""
        return bool(self.failed)

    def given_up(self, names: str, why: str = "") -> RequestError:
        """What the client is told where none of `names` takes the sequence."""
        if self.step_error is not None:
            return self.step_error
        if self.error is not None and self.loss not in (Loss.DIED, Loss.SILENT):
            return self.error
        last = "" if self.error is None else f": {self.error.message}"
        return unavailable("NO_VERIFIER", f"no verifier answers at {names}{why}{last}")
