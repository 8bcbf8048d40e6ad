"""Clients of one draft service, or of several: asynchronous, and for code without an event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from outrider.client import events
from outrider.client.endpoints import Metadata, Places, Security, Stub, check_plaintext, split
from outrider.client.errors import OutriderError, typed
from outrider.client.events import Collector, Completion, Event, Started
from outrider.client.request import Options, Prompt, build
from outrider.client.resume import Progress
from outrider.rpc.errors import UNSPECIFIED, unavailable
from outrider.rpc.timeouts import InactivityTimer
from outrider.rpc.tls import TLS
from protos.outrider.v1 import draft_service_pb2 as pb

# Between two tries the client pauses for as long as the service says, and at least for so long, doubled with each try.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 3.0
# A pause takes half of the time left at most, so that the last try is not made too late. With less left it gives up.
LEAST_LEFT_S = 0.05

_logger = logging.getLogger("outrider.client")


class AsyncClient:
    r"""Talks to draft services. One client serves any number of calls at once; make it inside the event loop that it
    is used in.

    Where there are several, calls go to them in turn, past those that failed lately. A call whose service dies, leaves
    or has no room goes on at another one, or at the same one once it is back, after what has been delivered, as long
    as it has one sample (with more of them, as long as none has begun): see "When a draft service dies" in
    docs/usage.md.

    Args:
        address: `HOST:PORT` of the draft service; or several, as a list or with commas between. A host that is a name
            stands for all its addresses, and is resolved again every 30 s and whenever one of them fails.
        timeout: seconds that a call may take in all, retries included, unless it says otherwise; None: for ever.
        patience: seconds that a call keeps trying while no draft service takes it, or goes on with it; None: as long as
            its timeout allows. 0 tries each address once.
        retry: whether a call is tried again at all, or goes on after what was delivered, where it ends as UNAVAILABLE
            or as RESOURCE_EXHAUSTED for want of room.
        silence: seconds that a service may say nothing, where there are others; then the call goes on at one of them. A
            service that has nothing to tell says so every 5 s.
        tls: how to speak TLS; None is plaintext. Its files, and that of the token, are read anew when they change.
        token_file: file whose first line that is neither empty nor begins with `#` is a bearer token; every call
            carries it.
        plaintext: speak plaintext to addresses that are not loopback too.

    Raises:
        ValueError: there is no address; a file is missing or is not what it should be; or `tls` is None, `plaintext` is
            not set, and an address is not loopback.

    >>> import asyncio
    >>> from outrider.client import AsyncClient, Chunk
    >>> async def main():
    ...     async with AsyncClient(address) as client:
    ...         pieces = []
    ...         async for event in client.generate("import os\n", max_new_tokens=16, temperature=0):
    ...             if isinstance(event, Chunk):
    ...                 pieces.append(event.text)
    ...         completion = await client.complete("import os\n", max_new_tokens=16, temperature=0)
    ...         return "".join(pieces) == completion.text
    >>> asyncio.run(main())
    True
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout: float | None = 300.0,
        patience: float | None = None,
        retry: bool = True,
        silence: float | None = 30.0,
        tls: TLS | None = None,
        token_file: str | Path | None = None,
        plaintext: bool = False,
    ):
        names = split(address)
        check_plaintext(names, tls=tls, plaintext=plaintext)
        self.address = ",".join(names)
        self._timeout = timeout
        self._patience = patience
        self._retry = retry
        self._silence = silence
        self._places = Places(names, security=Security(tls, token_file))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every channel; calls in progress are cancelled."""
        await self._places.close()

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Streams one generation: `Started`, then `Chunk`s, then a `Finished` for each sample; and `Queued` whenever it
        waits for its turn.

        Leaving the iterator, by `aclose`, by cancelling its task or by dropping it, cancels the call at both services.

        Args:
            prompt: text, token ids, or messages.
            timeout: seconds for this call; None: the client's.
            options: see `Options`.

        Raises:
            OutriderError: of the type that fits; see `outrider.client.errors`.
            TypeError: an option that does not exist.
        """
        tries = _Tries(self._timeout if timeout is None else timeout, self._patience)
        progress = Progress(build(prompt, options))
        while True:
            request, address = progress.request(), await self._places.choose()
            silence = await self._bearable_silence()
            call = self._places.begin(address, partial(_generate, request=request, timeout=tries.left))
            timer = InactivityTimer(silence)
            try:
                while (response := await timer.wait_for(call.read())) is not grpc.aio.EOF:
                    event = events.read(response)
                    if event is None:  # it is alive, and no more
                        continue
                    if not isinstance(event, Started):  # a service that fails each time after it has said so is no help
                        tries.helped()
                    for told in progress.take(event):
                        yield told
                return
            except (grpc.RpcError, TimeoutError) as error:
                if progress.is_over:
                    return
                await self._try_again(tries, address, error, progress)
            finally:
                timer.close()
                call.cancel()
            if progress.needs_eos:
                model = await self.get_model(timeout=tries.left)
                progress.eos_token_ids = frozenset(model.target.eos_token_ids)
            end = progress.ended()
            if end is not None:
                yield end
                return

    async def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """`generate`, put together. Same arguments, same errors."""
        collector = Collector()
        async for event in self.generate(prompt, timeout=timeout, **options):
            collector.add(event)
        return collector.completion()

    async def get_model(self, *, timeout: float | None = None) -> pb.DraftServiceGetModelResponse:
        """What the pair is: `model` is the draft, `target` the model whose text it is.

        Raises:
            OutriderError: of the type that fits.
        """
        tries = _Tries(self._timeout if timeout is None else timeout, self._patience)
        while True:
            address = await self._places.choose()
            silence = await self._bearable_silence()
            try:
                async with asyncio.timeout(silence):
                    return await self._places.begin(address, partial(_get_model, timeout=tries.left))
            except (grpc.RpcError, TimeoutError) as error:
                await self._try_again(tries, address, error)

    async def _bearable_silence(self) -> float | None:
        """Seconds; None for ever, where there is nobody else to ask."""
        return self._silence if self._retry and len(await self._places.addresses()) > 1 else None

    async def _try_again(
        self, tries: _Tries, address: str, cause: grpc.RpcError | TimeoutError, progress: Progress | None = None
    ) -> None:
        """Returns when the call that ended by `cause` is to be made again, after a pause or at once elsewhere.

        Raises:
            OutriderError: it is not.
        """
        if isinstance(cause, grpc.RpcError):
            failure = typed(cause, tries.timeout)
        else:
            failure = typed(
                unavailable(UNSPECIFIED, f"the draft service at {address} was silent for {self._silence:g} s")
            )
        tries.failed(address, failure)
        may = self._retry and failure.is_passing and (progress is None or progress.can_go_on)
        if failure.is_passing:
            self._places.failed(address)
        addresses = await self._places.addresses()
        elsewhere = tries.failures < len(addresses) and self._places.has_fresh()
        if not (may and await tries.pause(failure, elsewhere=elsewhere)):
            tries.describe(failure, addresses, 0 if progress is None else progress.delivered)
            raise failure from cause


def _generate(stub: Stub, metadata: Metadata, *, request: pb.GenerateRequest, timeout: float | None) -> Any:
    return stub.Generate(request, timeout=timeout, metadata=metadata)


def _get_model(stub: Stub, metadata: Metadata, *, timeout: float | None) -> Any:
    return stub.GetModel(pb.DraftServiceGetModelRequest(), timeout=timeout, metadata=metadata)


class _Tries:
    """The tries of one call: how long they may go on, and what became of them.

    Attributes:
        failures: failed tries since a service was last of help.
    """

    def __init__(self, timeout: float | None, patience: float | None) -> None:
        self.timeout = timeout
        self.failures = 0
        self._end = math.inf if timeout is None else time.monotonic() + timeout
        self._patience = math.inf if patience is None else patience
        self._give_up = math.inf  # when
        self._is_noted = False
        self._counts: dict[str, int] = {}
        self._last: OutriderError | None = None  # failure, but for that the time is over

    @property
    def left(self) -> float | None:
        """Seconds of the timeout; None is for ever."""
        return None if self._end == math.inf else max(self._end - time.monotonic(), 0.0)

    def helped(self) -> None:
        """A service has gone on with the call, or has it in its queue."""
        self.failures = 0

    def failed(self, address: str, failure: OutriderError) -> None:
        """A try has failed."""
        if not self.failures:
            self._give_up = time.monotonic() + self._patience
        self.failures += 1
        self._counts[address] = self._counts.get(address, 0) + 1
        if failure.is_passing:
            self._last = failure

    async def pause(self, failure: OutriderError, *, elsewhere: bool) -> bool:
        """Whether another try is worth it; the pause before it has passed then. None is needed `elsewhere`."""
        now = time.monotonic()
        if elsewhere:
            return now < self._end
        left = min(self._give_up, self._end) - now
        if left < LEAST_LEFT_S:
            return False
        backoff = min(FIRST_BACKOFF_S * 2 ** min(self.failures - 1, 10), MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
        hint = (failure.retry_after or 0.0) * random.uniform(1.0, 1.25)
        if not self._is_noted:
            self._is_noted = True
            _logger.warning("%s; trying again%s", failure, f" for {left:.3g} s" if left < math.inf else "")
        await asyncio.sleep(min(max(backoff, hint), left / 2))
        return True

    def describe(self, failure: OutriderError, addresses: Sequence[str], delivered: int) -> None:
        """Adds to a failure that ends the call where it was tried, how often, and what came."""
        is_late = failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and failure.reason == UNSPECIFIED
        if not (failure.is_passing or is_late):
            return
        failure.tries = {address: self._counts.get(address, 0) for address in (*addresses, *self._counts)}
        failure.delivered_tokens = delivered
        if is_late and self._last is not None:
            failure.message += f"; before that {self._last}"
        made = ", ".join(f"{address} ({count})" for address, count in failure.tries.items())
        failure.message += f"; tries at {made}; {delivered} tokens were delivered"


T = TypeVar("T")


class Client:
    """`AsyncClient` for plain code, over an event loop in a thread of its own. Any thread may call it.

    >>> from outrider.client import Client, InvalidRequest
    >>> with Client(address, timeout=60) as client:
    ...     try:
    ...         client.complete("x", top_p=0)
    ...     except InvalidRequest as error:
    ...         print(error.code.name, error.field)
    INVALID_ARGUMENT sampling.top_p
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout: float | None = 300.0,
        patience: float | None = None,
        retry: bool = True,
        silence: float | None = 30.0,
        tls: TLS | None = None,
        token_file: str | Path | None = None,
        plaintext: bool = False,
    ):
        """As `AsyncClient`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()
        make = partial(
            AsyncClient,
            address,
            timeout=timeout,
            patience=patience,
            retry=retry,
            silence=silence,
            tls=tls,
            token_file=token_file,
            plaintext=plaintext,
        )
        try:
            self._client = self._run(_made(make))
        except BaseException:
            self._stop()
            raise

    @property
    def address(self) -> str:
        return self._client.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every channel and ends the thread; calls in progress are cancelled. May be called twice."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._run(self._loop.shutdown_asyncgens())
        self._stop()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """As `AsyncClient.generate`. Closing or dropping the iterator cancels the call."""
        events = self._client.generate(prompt, timeout=timeout, **options)
        # An interrupt leaves a step behind that is still being cancelled: the iterator is closed after it, not under it
        one_at_a_time = asyncio.Lock()

        async def step() -> Event | None:
            async with one_at_a_time:
                return await anext(events, None)

        async def close() -> None:
            async with one_at_a_time:
                await events.aclose()

        try:
            while (event := self._run(step())) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._run(close())

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """As `AsyncClient.complete`."""
        return self._run(self._client.complete(prompt, timeout=timeout, **options))

    def get_model(self, *, timeout: float | None = None) -> pb.DraftServiceGetModelResponse:
        """As `AsyncClient.get_model`."""
        return self._run(self._client.get_model(timeout=timeout))

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            # An interrupt lands here while the call goes on over there.
            future.cancel()


async def _made(make: Callable[[], AsyncClient]) -> AsyncClient:
    # grpc.aio binds a channel to the loop that is running.
    return make()
