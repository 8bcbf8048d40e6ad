"""The verifiers of a draft service: name resolution, matching with the draft, health, and load balancing."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import grpc
import structlog

from draft_service.circuit_breaker import Breaker, State
from outrider.rpc import errors
from outrider.rpc.channel import Lookup, RenewedChannel, Resolver, look_up
from outrider.rpc.errors import RequestError, internal, unavailable
from outrider.service import tracing
from outrider.service.model_info import check_pair, check_target
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2

_log = structlog.get_logger()

# --- one verifier

GET_MODEL_TIMEOUT = 2.0
# Seconds for which a verifier's reported load of other draft services counts.
LOAD_SECONDS = 10.0
# Seconds to avoid a full verifier that gave no `retry_after`.
BUSY_SECONDS = 1.0


_STATUS_OF = {State.CLOSED: "ready", State.HALF_OPEN: "recovering", State.OPEN: "failing"}
STATUSES = ("unknown", "mismatched", *_STATUS_OF.values())
"""Of a verifier: no answer yet; another model than the target's; then by the state of its circuit breaker."""


class Replica:
    """A verifier at one address.

    Attributes:
        address: `HOST:PORT`.
        timeout: the longest time, in seconds, until a message that it owes.
        model: the model it runs; None before its first answer.
        mismatch: how its model differs from the target; empty if it does not.
        last_failure: the last error of a sequence there, or before its first answer the first one of a probe.
        busy_until: `time.monotonic()` until which it is full, by the `retry_after` of its first refusal.
        num_open: sequences of this service there.
        reported: its load with the last verdict, which came at `reported_at` by `time.monotonic()`.
    """

    def __init__(
        self,
        address: str,
        channel: RenewedChannel[Any],
        *,
        timeout: float,
        on_change: Callable[["Replica"], None] = lambda _: None,
    ) -> None:
        """`channel` is the one to `address`. `on_change` is called when `status` changes."""
        self.address = address
        self.timeout = timeout
        self.breaker = Breaker()
        self.model: model_pb2.ModelInfo | None = None
        self.mismatch = ""
        self.last_failure = ""
        self.busy_until = 0.0
        self.num_open = 0
        self.on_change = on_change
        self._channel = channel
        self._others = 0  # sequences of other services there, last reported
        self.reported = speculation_pb2.VerifierLoad()
        self.reported_at = 0.0
        self._noted = self.status

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.mismatch:
            return "mismatched"
        return "unknown" if self.model is None else _STATUS_OF[self.breaker.state]

    @property
    def has_target(self) -> bool:
        """Whether its last answer was the target's model."""
        return self.model is not None and not self.mismatch

    def is_usable(self) -> bool:
        """Whether a sequence may be opened there now. The verifier may still refuse it."""
        return self.has_target and self.breaker.admits()

    def load(self) -> int:
        """Sequences there: of this service now, of others as last reported."""
        return self.num_open + (self._others if time.monotonic() - self.reported_at < LOAD_SECONDS else 0)

    async def get_model(self) -> model_pb2.ModelInfo | RequestError:
        """The answer to GetModel, or why there is none."""
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            answer = await self._channel.begin(
                lambda stub, token: stub.GetModel(request, timeout=GET_MODEL_TIMEOUT, metadata=token)
            )
        except grpc.RpcError as error:
            return translate(error, self.address)
        except Exception as error:  # otherwise the task that probes it would end for good
            _log.exception("GetModel failed", verifier=self.address)
            return internal("INTERNAL", f"the call GetModel at {self.address} failed: {error}")
        if answer is None:
            return unreadable(self.address)
        model: model_pb2.ModelInfo = answer.model
        return model

    def probed(self, model: model_pb2.ModelInfo, mismatch: str) -> None:
        """Records the answer to GetModel. `mismatch` is how the model differs from the target."""
        self.breaker.probed(well=True)
        self.model, self.mismatch, self.busy_until = model, mismatch, 0.0
        self._note_status()

    def unanswered(self, error: RequestError) -> None:
        """Records a GetModel without an answer."""
        self.breaker.probed(well=False)
        if self.model is None and not self.last_failure:  # its status stays `unknown`: say why, once
            self.last_failure = error.message
            self.on_change(self)
        self._note_status()

    def verify(self, *, timeout: float) -> Any:
        """Begins a call of Verify. `timeout` is the time left of the client's deadline, in seconds."""
        trace = tracing.outgoing()
        return self._channel.begin(
            lambda stub, token: stub.Verify(timeout=timeout, wait_for_ready=False, metadata=token + trace)
        )

    def succeeded(self, epoch: int, load: speculation_pb2.VerifierLoad, *, draining: bool = False) -> None:
        """Records a verdict, with the load. `epoch` is the breaker's when its stream began, as for `failed`."""
        self._others = max(0, load.running + load.waiting - self.num_open)
        self.reported, self.reported_at = load, time.monotonic()
        if draining:
            self.failed(epoch, "the verifier is draining")
        else:
            self.breaker.succeeded(epoch)
            self._note_status()

    def failed(self, epoch: int, why: str) -> None:
        """Records that it died, is silent, or drains."""
        self.last_failure = why
        self.breaker.failed(epoch)
        self._note_status()

    def refused(self, retry_after: float | None) -> None:
        """Records that it refused a sequence, as it is full; `retry_after` is in seconds."""
        now = time.monotonic()
        # Each refusal names a later time than the one before. A new sequence need not wait for the last.
        if self.busy_until < now:
            self.busy_until = now + (BUSY_SECONDS if retry_after is None else retry_after)

    def mismatched(self, why: str) -> None:
        """Records that it runs another model now."""
        self.mismatch = why
        self._note_status()

    def _note_status(self) -> None:
        before, self._noted = self._noted, self.status
        if self._noted != before:
            self.on_change(self)

    async def close(self) -> None:
        await self._channel.close()


# --- errors of its calls

# Codes that mean a failed connection, if they carry no reason: every refusal by a verifier carries one.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_NOT_ADMITTED = {
    grpc.StatusCode.UNAUTHENTICATED: "check --verifier-token-file and --verifier-tls-cert here",
    grpc.StatusCode.PERMISSION_DENIED: "check --verifier-tls-cert here and --allow-client-san there",
}
_TLS_ADVICE: dict[errors.ConnectionFailure | None, str] = {
    errors.ConnectionFailure.NO_TLS: "; give the verifier --tls-cert and --tls-key, or leave out --verifier-tls-ca",
    errors.ConnectionFailure.CLOSED: " (--verifier-tls-ca, --verifier-tls-cert)",
    errors.ConnectionFailure.UNTRUSTED: "; check --verifier-tls-ca",
    errors.ConnectionFailure.OTHER_NAME: "; give --verifier-tls-name",
}
_OF_A_ROUND = ("proposal.", "decode.", "sequence_id")


def translate(error: grpc.RpcError, address: str) -> RequestError:
    """The error for the client: a refusal unchanged, a failed connection as NO_VERIFIER.

    The draft service makes the rounds, so a refused round is INTERNAL.
    """
    refusal = errors.from_rpc_error(error)
    if refusal.reason == errors.UNSPECIFIED and refusal.code is grpc.StatusCode.UNIMPLEMENTED:
        return unavailable("NO_VERIFIER", f"the service at {address} is not a verifier; correct --verifier")
    if _is_gone(refusal):
        advice = _TLS_ADVICE.get(refusal.connection, "")
        return unavailable("NO_VERIFIER", f"the verifier at {address} is unreachable: {refusal.message}{advice}")
    if refusal.code in _NOT_ADMITTED:
        _log.warning(
            "verifier refused this service",
            verifier=address,
            reason=refusal.message,
            action=_NOT_ADMITTED[refusal.code],
        )
        return unavailable(
            "NO_VERIFIER", f"the verifier at {address} refuses this draft service; the draft service's log says why"
        )
    field = refusal.metadata.get("field", "")
    of_a_round = refusal.reason in ("WRONG_BASE", "OUT_OF_ORDER") or field.startswith(_OF_A_ROUND)
    if refusal.code is grpc.StatusCode.INVALID_ARGUMENT and of_a_round:
        _log.error("verifier refused a round", verifier=address, reason=refusal.reason, text=refusal.message)
        return internal("INTERNAL", "internal error; the service's log has the cause")
    return refusal


def is_refusal(error: grpc.RpcError) -> bool:
    """Whether the error is an answer: it has a reason, or a code that no failed connection has."""
    return not _is_gone(errors.from_rpc_error(error))


def _is_gone(error: RequestError) -> bool:
    return error.reason == errors.UNSPECIFIED and error.code in _GONE


def unreadable(address: str) -> RequestError:
    """The error of a response that is no message of the contract."""
    return unavailable(
        "NO_VERIFIER",
        f"cannot parse the response of the verifier at {address}: check that --verifier is a verifier of this release",
    )


# --- all of them

# Seconds between two tries before the first verifier answers, and between two lines of the log.
FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0
SECONDS_PER_LINE = 5.0
# Seconds between two probes of a mismatched verifier, and the least between two resolutions of the names.
MISMATCHED_PAUSE, RESOLVE_PAUSE = 10.0, 0.5
# Seconds between two searches for a usable replica, if no replica changes.
SEARCH_SECONDS = 0.25
# Seconds between two checks whether a verifier with the target is left.
_LOST_POLL = 0.5


Connect = Callable[[str, str], RenewedChannel[Any]]
"""Makes the channel to an address; the second argument is the name, `HOST:PORT`, that was resolved to it."""


class Replicas:
    """The verifiers at the addresses of `--verifier`.

    Attributes:
        names: the addresses as given, for messages.
        target: the model that all used verifiers run; None before `match`.
    """

    def __init__(
        self,
        names: Collection[str],
        connect: Connect,
        *,
        timeout: float,
        resolve_interval: float = 10.0,
        lookup: Lookup = look_up,
    ) -> None:
        """`names` are `HOST:PORT` each, resolved by `lookup` every `resolve_interval` seconds. `timeout` is the longest
        time, in seconds, until a message that a verifier owes.
        """
        self.target: model_pb2.ModelInfo | None = None
        self.names = ", ".join(names)
        self._resolver = Resolver(names, lookup)
        self._connect = connect
        self._timeout = timeout
        self._resolve_interval = resolve_interval
        self._replicas: dict[str, Replica] = {}
        self._gone: list[Replica] = []  # no longer resolved; their sequences continue
        self._probers: dict[Replica, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._resolve_now = asyncio.Event()

    def all(self) -> list[Replica]:
        """The replicas at the addresses that the names resolve to now."""
        return list(self._replicas.values())

    async def match(self, draft: model_pb2.ModelInfo) -> model_pb2.ModelInfo:
        """Waits for a verifier whose model forms a pair with `draft`, and starts to watch all replicas.

        If several answer, the model of the first one is the target.

        Raises:
            RequestError: FAILED_PRECONDITION: all answer, and none forms a pair.
        """
        wait, started = FIRST_WAIT, time.monotonic()
        next_line = started
        while True:
            await self._resolve()
            answers = await asyncio.gather(*(replica.get_model() for replica in self.all()))
            refusals, pairs = list[RequestError](), list[model_pb2.ModelInfo]()
            for answer in answers:
                try:
                    if isinstance(answer, RequestError):
                        raise answer
                    check_pair(draft, answer)
                    pairs.append(answer)
                except RequestError as error:
                    refusals.append(error)
            if pairs:
                break
            if refusals and all(error.reason == "PAIR_MISMATCH" for error in refusals):
                raise refusals[0]
            if (now := time.monotonic()) >= next_line:
                next_line = now + SECONDS_PER_LINE
                _log.info(
                    "waiting for the verifier",
                    verifier=self.names,
                    seconds=round(now - started, 1),
                    answers=[f"{error.code.name}: {error.message}" for error in refusals],
                )
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, LONGEST_WAIT)
        target = self.target = pairs[0]
        if target.chat_template_fingerprint not in ("", draft.chat_template_fingerprint):
            _log.warning(
                "the target has another chat template",
                draft=draft.name,
                target=target.name,
                action="chats use the draft's: copy the target's chat template and tokenizer files to the draft",
            )
        for replica, answer in zip(self.all(), answers, strict=True):
            if not isinstance(answer, RequestError):
                replica.probed(answer, check_target(answer, target))
            self._probers[replica] = asyncio.create_task(self._probe(replica))
        if self._resolver.may_change:
            self._watcher = asyncio.create_task(self._watch_names())
        return target

    async def lost_target(self, seconds: float) -> str:
        """Returns once all verifiers have been mismatched for so many seconds, with how the first one differs.

        Sequences that run on are waited for: a verifier with the target may drain and have left the names.
        """
        since: float | None = None
        while True:
            replicas, now = self.all(), time.monotonic()
            runs = any(each.num_open for each in (*replicas, *self._gone))
            if runs or not replicas or not all(each.mismatch for each in replicas):
                since = None
            elif since is None:
                since = now
            elif now - since >= seconds:
                return replicas[0].mismatch
            await asyncio.sleep(_LOST_POLL)

    def close(self) -> None:
        """Stops watching. Channels close with the event loop."""
        for task in (*self._probers.values(), *([self._watcher] if self._watcher else [])):
            task.cancel()

    # ------------------------------------------------------------------------------------------------------- choosing

    def least_load(self) -> int:
        """Sequences at the usable replica that has the fewest; 0 if there is none."""
        return min((each.load() for each in self.all() if each.is_usable()), default=0)

    def choose(
        self, avoid: Mapping[Replica, float] | None = None, *, suspected: Collection[Replica] = (), proven: bool = False
    ) -> Replica | None:
        """The less loaded of two random usable replicas; None if there is none.

        Not the least loaded of all: reported loads are some rounds old, and many draft services would choose the same
        replica at once.

        Args:
            avoid: replicas not to use, and until when, by `time.monotonic()`.
            suspected: replicas that failed with the round; used only if there is no other.
            proven: only replicas whose breaker is closed and that are not full.
        """
        now = time.monotonic()
        ready = [each for each in self.all() if each.is_usable() and (avoid or {}).get(each, 0.0) <= now]
        if proven:
            ready = [each for each in ready if each.breaker.state is State.CLOSED and each.busy_until <= now]
        ready = [each for each in ready if each not in suspected] or ready
        # A full replica may have capacity again: try it if there is no better one.
        ready = [each for each in ready if each.busy_until <= now] or ready
        if len(ready) > 2:
            ready = random.sample(ready, 2)
        return min(ready, key=lambda replica: (replica.load(), random.random()), default=None)

    async def wait(
        self, until: float, avoid: Mapping[Replica, float] | None = None, *, suspected: Collection[Replica] = ()
    ) -> Replica | None:
        """As `choose`, but waits until `until` by `time.monotonic()`, unless no replica can become usable by then."""
        while (replica := self.choose(avoid, suspected=suspected)) is None:
            now = time.monotonic()
            free = [(avoid or {}).get(each, 0.0) for each in self.all() if not each.mismatch]
            if now >= until or (self._replicas and min(free, default=math.inf) > until):
                return None
            next_free = min((each for each in free if each > now), default=until)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(SEARCH_SECONDS, next_free - now, until - now)):
                    await self._changed.wait()
        return replica

    # ------------------------------------------------------------------------------------------------------- watching

    async def _probe(self, replica: Replica) -> None:
        """Probes a replica while it is unknown, mismatched or failing."""
        while True:
            if replica.has_target and replica.breaker.state is not State.OPEN:
                await self._changed.wait()
                continue
            await asyncio.sleep(MISMATCHED_PAUSE if replica.mismatch else replica.breaker.pause)
            answer = await replica.get_model()
            assert self.target is not None
            if isinstance(answer, RequestError):
                replica.unanswered(answer)
            else:
                replica.probed(answer, check_target(answer, self.target))

    async def _watch_names(self) -> None:
        """Resolves the names at intervals, and soon after a replica fails."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._resolve_interval):
                    await self._resolve_now.wait()
            self._resolve_now.clear()
            try:
                await self._resolve()
            except Exception:  # otherwise no verifier would be found until a restart
                _log.exception("resolving the verifiers' names failed", names=self.names)
            await asyncio.sleep(RESOLVE_PAUSE)

    async def _resolve(self) -> None:
        """Resolves the names; adds new replicas and removes old ones."""
        found = await self._resolver.resolve()
        for address in [address for address in self._replicas if address not in found]:
            replica = self._replicas.pop(address)
            self._gone.append(replica)
            _log.info("verifier removed", verifier=address, reason="its name no longer resolves to this address")
            if (prober := self._probers.pop(replica, None)) is not None:
                prober.cancel()
        for address, name in found.items():
            if address in self._replicas:
                continue
            channel = self._connect(address, name)
            replica = Replica(address, channel, timeout=self._timeout, on_change=self._on_change)
            self._replicas[address] = replica
            if name != address:
                _log.info("verifier added", verifier=address, name=name)
            if self.target is not None:
                self._probers[replica] = asyncio.create_task(self._probe(replica))
        for replica in [replica for replica in self._gone if not replica.num_open]:
            self._gone.remove(replica)
            await replica.close()

    def _on_change(self, replica: Replica) -> None:
        """Logs the new status, and wakes sequences that wait for a replica."""
        if replica in self._replicas.values():
            is_bad = replica.status in ("unknown", "mismatched", "failing")
            why = {"reason": replica.mismatch or replica.last_failure} if is_bad else {}
            (_log.warning if is_bad else _log.info)("verifier", verifier=replica.address, status=replica.status, **why)
        if replica.status == "failing":
            self._resolve_now.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
