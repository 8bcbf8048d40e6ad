"""The way to the verifiers: waiting until one is there, matching the pair, and opening sequences that outlive them."""

from collections.abc import Sequence

from draft_service.failover import Means, Observer, ResumingSequence
from draft_service.failover_budget import FailoverBudget
from draft_service.replicas import Replicas
from draft_service.resolver import Directory, Resolve, look_up
from draft_service.statistics import Failovers
from outrider.rpc.tls import ChannelTLS
from protos.outrider.v1 import model_pb2, verifier_service_pb2


class VerifierLink:
    """All verifiers there are, as one.

    Attributes:
        replicas: each of them.
        budget: what opening sequences again may cost.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        observer: Observer,
        max_message_bytes: int,
        silence: float,
        patience: float,
        burst: int,
        look_again: float,
        resolve: Resolve = look_up,
        tls: ChannelTLS | None = None,
    ) -> None:
        """
        Args:
            names: `HOST:PORT` of each; a DNS name stands for all its addresses.
            silence: how long a verifier may owe an answer, in seconds.
            patience: how long a sequence may be without a verifier, in seconds.
            burst: how many sequences may be opened again at once.
            look_again: after how many seconds names are resolved anew.
            resolve: what does that.
            tls: of the connections to them; None is plaintext.
        """
        self.replicas = Replicas(
            Directory(names, resolve),
            max_message_bytes=max_message_bytes,
            silence=silence,
            look_again=look_again,
            tls=tls,
        )
        self.budget = FailoverBudget(burst)
        self._means = Means(self.replicas, self.budget, patience, observer)

    async def match(self, draft: model_pb2.ModelInfo) -> model_pb2.ModelInfo:
        """Waits until a verifier is there, and checks that its model and `draft` form a pair.

        Raises:
            RequestError: FAILED_PRECONDITION: they do not.
        """
        return await self.replicas.match(draft)

    def open(
        self,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        timeout: float | None,
        tally: Failovers,
    ) -> ResumingSequence:
        """Begins a sequence. `timeout` is what is left of the client's deadline, in seconds; `tally` counts what losing
        verifiers costs it.
        """
        return ResumingSequence(self._means, opening, sequence_id=sequence_id, timeout=timeout, tally=tally)

    def close(self) -> None:
        """Stops looking after verifiers."""
        self.replicas.close()
