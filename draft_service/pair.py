"""What a service needs to serve: the drafters, the way to the target, and what both models say of themselves.

It knows nothing of requests.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from draft_service.drafters.base import Drafter, Kind
from draft_service.lengths import Lengths
from draft_service.verifier_link import VerifierLink
from outrider.lm.tokenizer import Tokenizer
from outrider.pace import Pace
from outrider.rpc.errors import overloaded
from protos.outrider.v1 import model_pb2


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and the target it was matched with.

    Attributes:
        drafters: what requests may choose from.
        default: what drafts where a request does not say.
        lengths: how many tokens at a time.
    """

    drafters: Mapping[Kind, Drafter]
    default: Kind
    lengths: Lengths
    link: VerifierLink
    tokenizer: Tokenizer
    draft: model_pb2.ModelInfo
    target: model_pb2.ModelInfo


class Places:
    """How many sequences may be in progress at once."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._taken = 0
        self._pace = Pace()

    @property
    def taken(self) -> int:
        """How many are in progress."""
        return self._taken

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Holds `count` places for as long as it is open.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with the time to wait, where there are not as many.
        """
        free = self._maximum - self._taken
        if count > free:
            seconds = self._pace.refuse(count - free)
            raise overloaded(
                f"{count} sequences asked for, and {free} of {self._maximum} places are free; "
                f"try again in about {seconds:.2g} s",
                retry_after=seconds,
                given=count,
                free=free,
                maximum=self._maximum,
            )
        self._taken += count
        try:
            yield
        finally:
            full = self._taken == self._maximum
            self._taken -= count
            for _ in range(count):
                self._pace.end(full=full)
