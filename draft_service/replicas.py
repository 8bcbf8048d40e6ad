"""The verifiers of a draft service: found by name, matched with the draft, watched, and one of them chosen."""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any

import grpc
import structlog

from draft_service.sequence import Sequence
from draft_service.verify_stream import VerifyStream, translate
from outrider.rpc.channel import Lookup, RenewedChannel, Resolver, look_up
from outrider.rpc.errors import RequestError, internal, unavailable
from outrider.rpc.tls import ChannelTLS
from outrider.service import tracing
from outrider.service.model_info import check_pair, check_target
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_log = structlog.get_logger()

# --- circuit breaker

# The pause after the first failure, and the longest: it doubles from one failure to the next.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
# Of each pause the last so much is left to chance, so that not all come back at once.
JITTER = 0.5
# A trial that has said nothing for so long does not keep the next from being made.
TRIAL_SECONDS = 1.0


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"  # all may try
    HALF_OPEN = "half_open"  # one at a time
    OPEN = "open"  # nobody


class Breaker:
    """A circuit breaker: closed until a try fails; then open for a pause; then, once a probe has gone well, half-open
    until a try does.

    The pause grows with the failures in a row, which only a try that goes well ends: who answers probes and fails at
    work is tried more and more seldom. Tries that were begun before it opened last count for nothing: a hundred that
    fail at once are one failure.

    Attributes:
        state: where it stands.
        epoch: how often it has opened.
    """

    def __init__(
        self, *, clock: Callable[[], float] | None = None, chance: Callable[[], float] = random.random
    ) -> None:
        """`clock` tells seconds, and `chance` draws from [0, 1)."""
        self.state = State.CLOSED
        self.epoch = 0
        self._clock = clock or time.monotonic
        self._chance = chance
        self._failures = 0  # in a row
        self._until = 0.0  # when the pause ends, while open
        self._trial: float | None = None  # when it began, while half-open

    @property
    def pause(self) -> float:
        """Seconds until a probe is due."""
        return max(0.0, self._until - self._clock()) if self.state is State.OPEN else 0.0

    def admits(self) -> bool:
        """Whether a try may begin now."""
        if self.state is State.HALF_OPEN:
            return self._trial is None or self._clock() - self._trial > TRIAL_SECONDS
        return self.state is State.CLOSED

    def begin(self) -> int:
        """A try begins; returns the epoch to name with what becomes of it."""
        if self.state is State.HALF_OPEN:
            self._trial = self._clock()
        return self.epoch

    def succeeded(self, epoch: int) -> bool:
        """A try went well; says whether that closed it."""
        if epoch != self.epoch or self.state is State.OPEN:
            return False
        was, self.state, self._failures = self.state, State.CLOSED, 0
        return was is not State.CLOSED

    def failed(self, epoch: int) -> bool:
        """A try failed; says whether that opened it."""
        if epoch != self.epoch or self.state is State.OPEN:
            return False
        self._open()
        return True

    def probed(self, *, well: bool) -> None:
        """A probe was made, the pause being over."""
        if self.state is not State.OPEN:
            return
        if well:
            self.state, self._trial = State.HALF_OPEN, None
        else:
            self._open()

    def _open(self) -> None:
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 30), LONGEST_PAUSE)
        self._failures += 1
        self.epoch += 1
        self.state = State.OPEN
        self._until = self._clock() + pause * (1 - JITTER * self._chance())


# --- one verifier

GET_MODEL_TIMEOUT = 2.0
# What a verifier said of others' sequences counts for so many seconds: without any of ours there nobody says more.
LOAD_SECONDS = 10.0
# How long one that has no room is left alone where it does not say.
BUSY_SECONDS = 1.0


class Replica:
    """A verifier at one address.

    Attributes:
        address: `HOST:PORT`, resolved where `name` says from what.
        model: what it runs, once that is known to be the target of the pair; None before.
        mismatch: how it differs from the target, where it does; empty otherwise.
        last_failure: what a sequence failed at there last.
        busy_until: `time.monotonic()` up to which it has no room, as the first that it refused was told.
        num_open: sequences of ours there.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int,
        silence: float,
        name: str = "",
        tls: ChannelTLS | None = None,
        on_change: Callable[["Replica"], None] = lambda _: None,
    ) -> None:
        """`silence` is how long it may owe an answer, in seconds; `name` the `HOST:PORT` that was resolved to
        `address`; without `tls` it speaks plaintext. `on_change` is called when the breaker opens or closes, or the
        model is known or another one.
        """
        self.address = address
        self._silence = silence
        self.breaker = Breaker()
        self.model: model_pb2.ModelInfo | None = None
        self.mismatch = ""
        self.last_failure = ""
        self.busy_until = 0.0
        self.num_open = 0
        self.on_change = on_change
        # Whoever stands in front of the verifier, and its certificate, knows it by the name that was asked for.
        self._channel: RenewedChannel[Any] = RenewedChannel(  # the asynchronous stub has the same methods
            address, VerifierServiceStub, max_message_bytes=max_message_bytes, tls=tls, name=name
        )
        self._others = 0  # sequences there that are not ours, as it said last
        self._load_time = 0.0  # when

    @property
    def status(self) -> str:
        """In one word: "unknown", "mismatched", or the state of its breaker."""
        if self.mismatch:
            return "mismatched"
        return "unknown" if self.model is None else self.breaker.state.value

    @property
    def has_target(self) -> bool:
        """Whether it runs the target of the pair, as far as is known."""
        return self.model is not None and not self.mismatch

    def is_usable(self) -> bool:
        """Whether a sequence may begin there now; it may be refused still."""
        return self.has_target and self.breaker.admits()

    def load(self) -> int:
        """Sequences there: ours as they are, others as it said last."""
        others = self._others if time.monotonic() - self._load_time < LOAD_SECONDS else 0
        return self.num_open + others

    async def ask(self) -> model_pb2.ModelInfo:
        """Asks what it runs.

        Raises:
            RequestError: it does not answer, or not yet.
        """
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            answer = await self._channel.begin(lambda stub: stub.GetModel(request, timeout=GET_MODEL_TIMEOUT))
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        if answer is None:
            raise unavailable("NO_VERIFIER", f"could not parse the response of the verifier at {self.address}")
        model: model_pb2.ModelInfo = answer.model
        return model

    def probed(self, model: model_pb2.ModelInfo | None, mismatch: str = "") -> None:
        """It was asked what it runs: this, which differs from the target as said; None: it did not answer."""
        before = self.status
        if self.breaker.state is State.OPEN:
            self.breaker.probed(well=model is not None)
        elif model is None:
            self.breaker.failed(self.breaker.epoch)
        if model is not None:
            self.model, self.mismatch, self.busy_until = model, mismatch, 0.0
        if self.status != before:
            self.on_change(self)

    def open(self, sequence: Sequence, *, timeout: float | None) -> "Lease":
        """Reserves the replica for a sequence; `timeout` is what is left of the client's deadline, in seconds."""
        metadata = tracing.outgoing()
        call = self._channel.begin(lambda stub: stub.Verify(timeout=timeout, wait_for_ready=False, metadata=metadata))
        fingerprint = "" if self.model is None else self.model.weights_fingerprint
        stream = VerifyStream(call, sequence, address=self.address, fingerprint=fingerprint, silence=self._silence)
        return Lease(self, stream)

    async def close(self) -> None:
        """Ends all that is under way there."""
        await self._channel.close()


class Lease:
    """A sequence's claim on a replica, with its stream there; the replica learns from what becomes of it."""

    def __init__(self, replica: Replica, stream: VerifyStream) -> None:
        self.replica = replica
        self.stream = stream
        self._epoch = replica.breaker.begin()
        self._is_over = False
        replica.num_open += 1

    def succeeded(self, load: speculation_pb2.VerifierLoad) -> None:
        """A verdict came, with the replica's load."""
        self.replica._others = max(0, load.running + load.waiting - self.replica.num_open)
        self.replica._load_time = time.monotonic()
        if self.stream.draining:
            self.failed("it is draining")
        elif self.replica.breaker.succeeded(self._epoch):
            self.replica.on_change(self.replica)

    def failed(self, why: str) -> None:
        """The replica is gone, silent, or about to go."""
        self.replica.last_failure = why
        if self.replica.breaker.failed(self._epoch):
            self.replica.on_change(self.replica)

    def refused(self, retry_after: float | None) -> None:
        """The replica has no room for so many seconds; None where it did not say."""
        now = time.monotonic()
        # Each that is refused is told a later time than the one before; who comes anew need not wait longest.
        if self.replica.busy_until < now:
            self.replica.busy_until = now + (BUSY_SECONDS if retry_after is None else retry_after)

    def mismatched(self, why: str) -> None:
        """The replica runs another model by now."""
        self.replica.mismatch = why
        self.replica.on_change(self.replica)

    async def close(self) -> None:
        """Ends the stream, well where nothing is owed."""
        try:
            await self.stream.close()
        finally:
            self.cancel()  # also where the client leaves just now

    def cancel(self) -> None:
        """Ends the stream here and now, whatever it owes. May be called twice."""
        self.stream.cancel()
        if not self._is_over:
            self._is_over = True
            self.replica.num_open -= 1


# --- all of them

# While no verifier is there at the start.
FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0
SECONDS_PER_LINE = 5.0
# How long one that runs another model is left alone, and how long lies between two looks at the names at least.
MISMATCHED_PAUSE, LOOK_PAUSE = 10.0, 0.5
# Whoever waits for a replica looks this often, beside when one changes.
GLANCE = 0.25


class Replicas:
    """The verifiers that the names stand for.

    Attributes:
        names: for messages.
        target: the model of all that are used, once the first was matched.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        max_message_bytes: int,
        silence: float,
        look_again: float = 10.0,
        lookup: Lookup = look_up,
        tls: ChannelTLS | None = None,
    ) -> None:
        """`names` are `HOST:PORT` each, resolved by `lookup`, and again after `look_again` seconds. `silence` is how
        long a verifier may owe an answer, in seconds; without `tls` connections are plaintext.
        """
        self.target: model_pb2.ModelInfo | None = None
        self.names = ", ".join(names)
        self._resolver = Resolver(names, lookup)
        self._replica = partial(
            Replica, max_message_bytes=max_message_bytes, silence=silence, tls=tls, on_change=self._on_change
        )
        self._look_again = look_again
        self._replicas: dict[str, Replica] = {}
        self._gone: list[Replica] = []  # no name stands for them any more; their sequences go on
        self._keepers: dict[Replica, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._statuses: dict[Replica, str] = {}  # as logged last
        self._changed = asyncio.Event()
        self._look_now = asyncio.Event()

    def all(self) -> list[Replica]:
        """Those that the names stand for now."""
        return list(self._replicas.values())

    async def match(self, draft: model_pb2.ModelInfo) -> model_pb2.ModelInfo:
        """Waits until a verifier is there, checks that its model and `draft` form a pair, and begins to watch all.

        Of those that answer at once the first named one says which model is the target.

        Raises:
            RequestError: FAILED_PRECONDITION: all answer, and none forms a pair.
        """
        wait, started = FIRST_WAIT, time.monotonic()
        next_line = started
        while True:
            await self._look()
            answers = await asyncio.gather(*(_answer(replica) for replica in self.all()))
            errors = [error for answer in answers if (error := _problem(draft, answer))]
            if len(errors) < len(answers):
                break
            if errors and all(error.reason == "PAIR_MISMATCH" for error in errors):
                raise errors[0]
            if (now := time.monotonic()) >= next_line:
                next_line = now + SECONDS_PER_LINE
                _log.info(
                    "waiting for the verifier",
                    verifier=self.names,
                    seconds=round(now - started, 1),
                    answers=[f"{error.code.name}: {error.message}" for error in errors],
                )
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, LONGEST_WAIT)
        target = next(each for each in answers if not isinstance(each, RequestError) and not _problem(draft, each))
        self.target = target
        for replica, answer in zip(self.all(), answers, strict=True):
            if not isinstance(answer, RequestError):
                replica.probed(answer, check_target(answer, target))
            self._keepers[replica] = asyncio.create_task(self._keep(replica))
        if self._resolver.may_change:
            self._watcher = asyncio.create_task(self._watch_names())
        return target

    def close(self) -> None:
        """Stops watching. Channels end with the event loop."""
        for task in (*self._keepers.values(), *([self._watcher] if self._watcher else [])):
            task.cancel()

    # ------------------------------------------------------------------------------------------------------- choosing

    def choose(
        self, avoid: Mapping[Replica, float] | None = None, *, failed: Collection[Replica] = (), proven: bool = False
    ) -> Replica | None:
        """The less loaded of two that are usable now, by chance where that decides nothing; None where there is none.

        Of two, and not of all: what is known of a verifier's load is some rounds old, and where many draft services
        knew the same, all would run to the one that had least to do.

        Args:
            avoid: until when, by `time.monotonic()`, a sequence is not wanted at a replica.
            failed: where its round has failed; one of these is chosen where there is no other.
            proven: only replicas whose breaker is closed and that are not busy.
        """
        now = time.monotonic()
        ready = [each for each in self.all() if each.is_usable() and (avoid or {}).get(each, 0.0) <= now]
        if proven:
            ready = [each for each in ready if each.breaker.state is State.CLOSED and each.busy_until <= now]
        ready = [each for each in ready if each not in failed] or ready
        # One that has refused others may have room again: where there is no better one it is asked, and says itself.
        ready = [each for each in ready if each.busy_until <= now] or ready
        if len(ready) > 2:
            ready = random.sample(ready, 2)
        return min(ready, key=lambda replica: (replica.load(), random.random()), default=None)

    async def wait(
        self, until: float, avoid: Mapping[Replica, float] | None = None, *, failed: Collection[Replica] = ()
    ) -> Replica | None:
        """As `choose`, but waits until `time.monotonic()` is `until`; gives up at once where waiting is vain."""
        while (replica := self.choose(avoid, failed=failed)) is None:
            now = time.monotonic()
            free = [(avoid or {}).get(each, 0.0) for each in self.all() if each.is_usable()]
            hopeless = bool(self._replicas) and all(each.mismatch for each in self.all())
            if now >= until or hopeless or (free and min(free) > until):
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(min(GLANCE, min(until, *free) - now if free else until - now)):
                    await self._changed.wait()
        return replica

    # ------------------------------------------------------------------------------------------------------- watching

    async def _keep(self, replica: Replica) -> None:
        """Probes a replica whenever nothing is known of it, or nothing good."""
        while True:
            if replica.has_target and replica.breaker.state is not State.OPEN:
                await self._changed.wait()
                continue
            await asyncio.sleep(MISMATCHED_PAUSE if replica.mismatch else replica.breaker.pause)
            answer = await _answer(replica)
            assert self.target is not None
            if isinstance(answer, RequestError):
                replica.probed(None)
            else:
                replica.probed(answer, check_target(answer, self.target))

    async def _watch_names(self) -> None:
        """Looks at the names now and then, and soon where a replica was lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_again):
                    await self._look_now.wait()
            self._look_now.clear()
            await self._look()
            await asyncio.sleep(LOOK_PAUSE)

    async def _look(self) -> None:
        """Resolves the names, and takes new replicas in and old ones out."""
        found = await self._resolver.resolve()
        for address in [address for address in self._replicas if address not in found]:
            replica = self._replicas.pop(address)
            self._statuses.pop(replica, None)
            self._gone.append(replica)
            _log.info("a verifier is gone from its name", verifier=address)
            if (keeper := self._keepers.pop(replica, None)) is not None:
                keeper.cancel()
        for address, name in found.items():
            if address in self._replicas:
                continue
            self._replicas[address] = replica = self._replica(address, name=name)
            if name != address:
                _log.info("a verifier was found by its name", verifier=address, name=name)
            if self.target is not None:
                self._keepers[replica] = asyncio.create_task(self._keep(replica))
        for replica in [replica for replica in self._gone if not replica.num_open]:
            self._gone.remove(replica)
            await replica.close()

    def _on_change(self, replica: Replica) -> None:
        """Wakes whoever waits for a change."""
        before, self._statuses[replica] = self._statuses.get(replica), replica.status
        if replica.status != before and replica in self._replicas.values():
            is_bad = replica.status in ("mismatched", State.OPEN)
            why = {"reason": replica.mismatch or replica.last_failure} if is_bad else {}
            (_log.warning if is_bad else _log.info)("verifier", verifier=replica.address, status=replica.status, **why)
        if replica.status == State.OPEN:
            self._look_now.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _answer(replica: Replica) -> model_pb2.ModelInfo | RequestError:
    try:
        return await replica.ask()
    except RequestError as error:
        return error
    except Exception as error:  # without an answer its keeper would end, and it would never be used again
        _log.exception("asking a verifier for its model failed", verifier=replica.address)
        return internal("INTERNAL", f"asking {replica.address} for its model failed: {error}")


def _problem(draft: model_pb2.ModelInfo, answer: model_pb2.ModelInfo | RequestError) -> RequestError | None:
    """Why an answer is not that of a target for `draft`; None where it is."""
    try:
        if isinstance(answer, RequestError):
            return answer
        check_pair(draft, answer)
    except RequestError as error:
        return error
    return None
