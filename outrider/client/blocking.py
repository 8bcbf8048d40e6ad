"""`Client`: the asynchronous client for code without an event loop. It adds a thread, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from outrider.client.asynchronous import AsyncClient
from outrider.client.events import Event
from outrider.client.request import Options, Prompt
from outrider.client.results import Completion
from outrider.rpc.tls import TLS
from protos.outrider.v1 import draft_service_pb2 as pb

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
