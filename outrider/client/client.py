"""Clients of one draft service, or of several: asynchronous, and for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from outrider.client.endpoints import Endpoints, split
from outrider.client.errors import typed
from outrider.client.events import Completion, Event, read
from outrider.client.request import Options, Prompt, build
from outrider.client.resume import Call, Generation
from outrider.rpc.channel import check_plaintext
from outrider.rpc.errors import UNSPECIFIED, unavailable
from outrider.rpc.timeouts import InactivityTimer
from outrider.rpc.tls import TLS
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import verifier_service_pb2

T = TypeVar("T")

_LOOK_S = 5.0  # for one question about what serves at an address


class AsyncClient:
    r"""Talks to draft services. One client serves any number of calls at once; make it inside the event loop that it
    is used in.

    Where there are several, calls go to them in turn, past those that failed lately. A call whose service dies, leaves
    or has no room goes on at another one, or at the same one once it is back, after what has been delivered, as long
    as it has one sample (with more of them, as long as none has begun): see "Retries and several services" in
    docs/reference/client.md.

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
        if tls is not None and plaintext:
            raise ValueError("tls and plaintext exclude each other")
        for name in names:
            if tls is None and not plaintext:
                check_plaintext(name, "give tls=TLS(...), or plaintext=True")
        self.address = ",".join(names)
        self._timeout = timeout
        self._patience = patience
        self._retry = retry
        self._silence = silence
        self._endpoints = Endpoints(names, tls, token_file)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every channel; calls in progress are cancelled."""
        await self._endpoints.close()

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
        generation = Generation(build(prompt, options), self._timeout if timeout is None else timeout, self._patience)
        while True:
            call, silence = await self._begin(generation, "Generate", generation.request())
            responses = aiter(call)
            try:
                with InactivityTimer(silence) as timer:
                    while (response := await timer.wait_for(anext(responses, None))) is not None:
                        event = read(response)
                        if event is None:  # a sign of life
                            continue
                        for each in generation.take(event):
                            yield each
                return
            except (grpc.RpcError, TimeoutError) as error:
                if generation.is_over:
                    return
                await self._recover(generation, error)
            finally:
                call.cancel()
            if generation.needs_eos:
                model = await self.get_model(timeout=generation.time_left)
                generation.eos_token_ids = frozenset(model.target.eos_token_ids)
            if (end := generation.ended()) is not None:
                yield end
                return

    async def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """`generate`, put together. Same arguments, same errors."""
        events = [event async for event in self.generate(prompt, timeout=timeout, **options)]
        return Completion.of(events)

    async def get_model(self, *, timeout: float | None = None) -> pb.DraftServiceGetModelResponse:
        """What the pair is: `model` is the draft, `target` the model whose text it is.

        Raises:
            OutriderError: of the type that fits.
        """
        call = Call(self._timeout if timeout is None else timeout, self._patience)
        while True:
            response, silence = await self._begin(call, "GetModel", pb.DraftServiceGetModelRequest())
            try:
                async with asyncio.timeout(silence):
                    return cast("pb.DraftServiceGetModelResponse", await response)
            except (grpc.RpcError, TimeoutError) as error:
                await self._recover(call, error)

    async def _begin(self, call: Call, method: str, request: Any) -> tuple[Any, float | None]:
        """Begins a try; and seconds that it may be silent: None, for ever, where there is no other endpoint."""
        call.address = await self._endpoints.choose()
        others = self._retry and len(await self._endpoints.addresses()) > 1
        begun = self._endpoints.begin(call.address, method, request, timeout=call.time_left)
        return begun, self._silence if others else None

    async def _recover(self, call: Call, cause: grpc.RpcError | TimeoutError) -> None:
        """Returns when the try that ended by `cause` is to be made again, after a pause or at once elsewhere.

        Raises:
            OutriderError: it is not.
        """
        if isinstance(cause, grpc.RpcError):
            failure = typed(cause, call.timeout)
        else:
            silent = f"the draft service at {call.address} was silent for {self._silence:g} s"
            failure = typed(unavailable(UNSPECIFIED, silent))
        if failure.code is grpc.StatusCode.UNIMPLEMENTED and await self._is_verifier(call.address):
            failure.message = f"{call.address} is a verifier, not a draft service"
        call.failed(failure)
        if failure.is_passing:
            self._endpoints.failed(call.address)
        addresses = await self._endpoints.addresses()
        elsewhere = call.failures < len(addresses) and self._endpoints.has_fresh()
        may = self._retry and failure.is_passing and call.can_go_on
        if not (may and await call.pause(failure, elsewhere=elsewhere)):
            raise call.described(failure, addresses) from cause

    async def _is_verifier(self, address: str) -> bool:
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            await self._endpoints.begin(address, "GetModel", request, timeout=_LOOK_S, service="verifier")
        except grpc.RpcError:
            return False
        return True


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

        async def make() -> AsyncClient:  # over there: grpc.aio binds a channel to the loop that is running
            return AsyncClient(
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
            self._client = self._run(make())
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
