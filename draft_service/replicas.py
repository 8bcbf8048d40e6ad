"""All verifiers of a draft service: found by name, matched with the draft, watched, and one of them chosen."""

import asyncio
import random
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import structlog

from draft_service.breaker import State
from draft_service.replica import Replica
from draft_service.resolver import Directory
from outrider.rpc.errors import RequestError, internal
from outrider.rpc.tls import ChannelTLS
from outrider.service.model_info import check_pair
from protos.outrider.v1 import model_pb2

_BOUNDS = ("max_gamma", "max_support", "max_sequence_tokens", "max_stop_token_ids", "max_message_bytes")


def check_target(model: model_pb2.ModelInfo, target: model_pb2.ModelInfo) -> str:
    """How `model` differs from the target in what a sequence depends on; empty where it does not.

    Requests are checked against the limits of the first that was matched, so another one must take no less.
    """
    for field, what in (
        ("weights_fingerprint", "weights"),
        ("vocabulary_fingerprint", "vocabulary"),
        ("protocol_version", "protocol version"),
        ("noise_version", "noise version"),
    ):
        given, expected = str(getattr(model, field)), str(getattr(target, field))
        if given != expected:
            return f"its {what} is {given[:16]}; the target's is {expected[:16]}"
    for field in ("features", "rules"):
        missing = sorted(set(getattr(target, field)) - set(getattr(model, field)), key=str)
        if missing:
            return f"its {field} lack {', '.join(map(str, missing))}"
    for bound in _BOUNDS:
        given, expected = getattr(model.limits, bound), getattr(target.limits, bound)
        if given < expected:
            return f"its {bound} is {given}; the first verifier's is {expected}"
    return ""


_log = structlog.get_logger()

# While no verifier is there at the start.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
SECONDS_PER_LINE = 5.0
# How long one that runs another model is left alone, and how long lies between two looks at the names at least.
MISMATCHED_PAUSE, LOOK_PAUSE = 10.0, 0.5
# Whoever waits for a replica looks this often, beside when one changes.
GLANCE = 0.25

Avoid = Mapping[Replica, float]
"""Until when, by `time.monotonic()`, a sequence is not wanted at a replica."""


class Replicas:
    """The verifiers that the names stand for.

    Attributes:
        target: the model of all that are used, once the first was matched.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        max_message_bytes: int,
        silence: float,
        look_again: float = 10.0,
        tls: ChannelTLS | None = None,
    ) -> None:
        """`silence` is how long one may owe an answer, and after `look_again` names are resolved anew, in seconds;
        `tls` is how to speak to them, None plaintext.
        """
        self.target: model_pb2.ModelInfo | None = None
        self._directory = directory
        self._max_message_bytes = max_message_bytes
        self._silence = silence
        self._tls = tls
        self._look_again = look_again
        self._replicas: dict[str, Replica] = {}
        self._gone: list[Replica] = []  # no name stands for them any more; their sequences go on
        self._keepers: dict[Replica, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._statuses: dict[Replica, str] = {}
        self._changed = asyncio.Event()
        self._look_now = asyncio.Event()

    @property
    def names(self) -> str:
        """What stands for the verifiers, for messages."""
        return ", ".join(self._directory.names)

    def all(self) -> list[Replica]:
        """Those that the names stand for now."""
        return list(self._replicas.values())

    # ---------------------------------------------------------------------------------------------------- the start

    async def match(self, draft: model_pb2.ModelInfo) -> model_pb2.ModelInfo:
        """Waits until a verifier is there, checks that its model and `draft` form a pair, and begins to watch all.

        Of those that answer at once the first named one says which model is the target.

        Raises:
            RequestError: FAILED_PRECONDITION: all answer, and none forms a pair.
        """
        pause, started = FIRST_PAUSE, time.monotonic()
        next_line = started
        while True:
            await self._look()
            answers = await asyncio.gather(*(_answer(replica) for replica in self.all()))
            target, errors = _first_pair(draft, answers)
            if target is not None:
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
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        self.target = target
        for replica, answer in zip(self.all(), answers, strict=True):
            if not isinstance(answer, RequestError):
                replica.probed(answer, check_target(answer, target))
            self._keepers[replica] = asyncio.create_task(self._keep(replica))
        if self._directory.changes:
            self._watcher = asyncio.create_task(self._watch_names())
        return target

    # ------------------------------------------------------------------------------------------------------- choosing

    def choose(
        self, avoid: Avoid | None = None, *, failed: Collection[Replica] = (), proven: bool = False
    ) -> Replica | None:
        """The less loaded of two that are usable now, by chance where that decides nothing; None where there is none.

        Of two, and not of all: what is known of a verifier's load is some rounds old, and where many draft services
        knew the same, all would run to the one that had least to do.

        Args:
            avoid: where a sequence is not wanted yet.
            failed: where its round has failed; one of these is chosen where there is no other.
            proven: those alone that nothing speaks against.
        """
        now = time.monotonic()
        ready = [
            replica
            for replica in self._replicas.values()
            if replica.is_usable() and (avoid or {}).get(replica, 0.0) <= now
        ]
        if proven:
            ready = [each for each in ready if each.breaker.state is State.CLOSED and each.busy_until <= now]
        ready = [each for each in ready if each not in failed] or ready
        # One that has refused others may have room again: where there is no better one it is asked, and says itself.
        ready = [each for each in ready if each.busy_until <= now] or ready
        if len(ready) > 2:
            ready = random.sample(ready, 2)
        return min(ready, key=lambda replica: (replica.load(), random.random()), default=None)

    async def wait(
        self, until: float, avoid: Avoid | None = None, *, failed: Collection[Replica] = ()
    ) -> Replica | None:
        """As `choose`, but waits until `time.monotonic()` is `until`; gives up at once where waiting is vain."""
        while (replica := self.choose(avoid, failed=failed)) is None:
            now = time.monotonic()
            free = [(avoid or {}).get(each, 0.0) for each in self._replicas.values() if each.is_usable()]
            hopeless = bool(self._replicas) and all(each.mismatch for each in self._replicas.values())
            if now >= until or hopeless or (free and min(free) > until):
                return None
            await self._change(within=min(until, *free) - now if free else until - now)
        return replica

    async def _change(self, within: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(within, GLANCE)):
                await self._changed.wait()

    # ------------------------------------------------------------------------------------------------------- watching

    def close(self) -> None:
        """Stops watching. Channels end with the event loop."""
        for task in (*self._keepers.values(), *([self._watcher] if self._watcher else [])):
            task.cancel()

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
        """Finds out what the names stand for, and takes new ones in and old ones out."""
        found = await self._directory.look()
        for address in [address for address in self._replicas if address not in found]:
            replica = self._replicas.pop(address)
            self._statuses.pop(replica, None)
            self._gone.append(replica)
            _log.info("a verifier is gone from its name", verifier=address)
            if (keeper := self._keepers.pop(replica, None)) is not None:
                keeper.cancel()
        for address, name in found.items():
            if address not in self._replicas:
                self._replicas[address] = replica = self._make(address, name)
                if self.target is not None:
                    self._keepers[replica] = asyncio.create_task(self._keep(replica))
        for replica in [replica for replica in self._gone if not replica.num_open]:
            self._gone.remove(replica)
            await replica.close()

    def _make(self, address: str, name: str) -> Replica:
        replica = Replica(
            address,
            max_message_bytes=self._max_message_bytes,
            silence=self._silence,
            name=name,
            tls=self._tls,
            on_change=lambda: self._on_change(replica),
        )
        return replica

    def _on_change(self, replica: Replica) -> None:
        """Wakes whoever waits for a change."""
        before, self._statuses[replica] = self._statuses.get(replica), replica.status
        if replica.status != before and replica in self._replicas.values():
            if replica.status in ("mismatched", State.OPEN):
                why = replica.mismatch or replica.trouble
                _log.warning("verifier", verifier=replica.address, status=replica.status, reason=why)
            else:
                _log.info("verifier", verifier=replica.address, status=replica.status)
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


def _first_pair(
    draft: model_pb2.ModelInfo, answers: Sequence[model_pb2.ModelInfo | RequestError]
) -> tuple[model_pb2.ModelInfo | None, list[RequestError]]:
    """The first answer that forms a pair with the draft, if one does, and what is wrong with those before it."""
    errors = []
    for answer in answers:
        try:
            if isinstance(answer, RequestError):
                raise answer
            check_pair(draft, answer)
        except RequestError as error:
            errors.append(error)
        else:
            return answer, errors
    return None, errors
