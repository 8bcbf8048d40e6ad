"""`AsyncClient`: many calls to one draft service, or to several. Knows when a call may be tried again or go on
elsewhere, not what it asks for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from outrider.client import events
from outrider.client.errors import OutriderError, typed
from outrider.client.events import Event
from outrider.client.places import FIRST_BACKOFF_S, MAX_ATTEMPTS, MAX_BACKOFF_S, Places, Stub, split
from outrider.client.progress import Progress
from outrider.client.request import Options, Prompt, build
from outrider.client.results import Collector, Completion
from outrider.client.security import Metadata, Security, check_plaintext
from outrider.client.silence import Heard
from outrider.rpc.errors import UNSPECIFIED, unavailable
from outrider.rpc.tls import TLS
from protos.outrider.v1 import draft_service_pb2 as pb

_ELSEWHERE = grpc.StatusCode.UNAVAILABLE
_REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class AsyncClient:
    r"""Talks to draft services. One client serves any number of calls at once; make it inside the event loop that it
    is used in.

    Where there are several, calls go to them in turn, past those that failed lately. A call whose service dies, or
    leaves, goes on at another one after what has been delivered, as long as it has one sample (with more of them, as
    long as none has begun): see "When a draft service dies" in docs/usage.md.

    Args:
        address: `HOST:PORT` of the draft service; or several, as a list or with commas between. A host that is a name
            stands for all its addresses, and is resolved again every 30 s and whenever one of them fails.
        timeout: seconds that a call may take in all, retries included, unless it says otherwise; None: for ever.
        retry: whether a call that is refused as UNAVAILABLE or RESOURCE_EXHAUSTED is tried again, at most four times in
            a row, and whether one that breaks with UNAVAILABLE after its first response goes on elsewhere.
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
        self._retry = retry
        self._silence = silence
        self._places = Places(names, retry=retry, security=Security(tls, token_file))

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
        """Streams one generation: `Started`, then `Chunk`s, then a `Finished` for each sample.

        Leaving the iterator, by `aclose`, by cancelling its task or by dropping it, cancels the call at both services.

        Args:
            prompt: text, token ids, or messages.
            timeout: seconds for this call; None: the client's.
            options: see `Options`.

        Raises:
            OutriderError: of the type that fits; see `outrider.client.errors`.
            TypeError: an option that does not exist.
        """
        patience = _Patience(self._timeout if timeout is None else timeout)
        progress = Progress(build(prompt, options))
        while True:
            request, address, came = progress.request(), await self._places.choose(), False
            silence = await self._bearable_silence()
            call = self._places.begin(address, partial(_generate, request=request, timeout=patience.left))
            responses = Heard[pb.GenerateResponse](call, silence)
            try:
                async for response in responses:
                    event = events.read(response)
                    if event is None:  # it is alive, and no more
                        continue
                    came = True
                    patience.renew()
                    for told in progress.take(event):
                        yield told
                return
            except grpc.RpcError as error:
                if progress.is_over:
                    return
                failure = typed(error, patience.timeout)
                await self._leave(address, failure, error, patience, may=progress.can_go_on, came=came)
            except TimeoutError as error:
                if progress.is_over:
                    return
                failure = _silent(address, self._silence)
                await self._leave(address, failure, error, patience, may=progress.can_go_on, came=came)
            finally:
                responses.close()
            if progress.needs_eos:
                model = await self.get_model(timeout=patience.left)
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
        patience = _Patience(self._timeout if timeout is None else timeout)
        while True:
            address = await self._places.choose()
            silence = await self._bearable_silence()
            try:
                async with asyncio.timeout(silence):
                    return await self._places.begin(address, partial(_get_model, timeout=patience.left))
            except grpc.RpcError as error:
                await self._leave(address, typed(error, patience.timeout), error, patience)
            except TimeoutError as error:
                await self._leave(address, _silent(address, self._silence), error, patience)

    async def _bearable_silence(self) -> float | None:
        """Seconds; None for ever, where there is nobody else to ask."""
        return self._silence if self._retry and len(await self._places.addresses()) > 1 else None

    async def _leave(
        self,
        address: str,
        failure: OutriderError,
        cause: Exception,
        patience: _Patience,
        *,
        may: bool = True,
        came: bool = False,
    ) -> None:
        """Returns when the call is to be made again, elsewhere; `came` is whether this one had been answered.

        Raises:
            OutriderError: `failure`, where it is not.
        """
        if failure.code in _REFUSED:
            self._places.failed(address)
        again = failure.code is _ELSEWHERE or (failure.code in _REFUSED and not came)
        if not (again and may and self._retry and len(await self._places.addresses()) > 1):
            raise failure from cause
        if not await patience.may_try_again(at_once=self._places.has_fresh()):
            raise failure from cause


def _silent(address: str, seconds: float | None) -> OutriderError:
    return typed(unavailable(UNSPECIFIED, f"the draft service at {address} was silent for {seconds:g} s"))


def _generate(stub: Stub, metadata: Metadata, *, request: pb.GenerateRequest, timeout: float | None) -> Any:
    return stub.Generate(request, timeout=timeout, metadata=metadata)


def _get_model(stub: Stub, metadata: Metadata, *, timeout: float | None) -> Any:
    return stub.GetModel(pb.DraftServiceGetModelRequest(), timeout=timeout, metadata=metadata)


class _Patience:
    """How long one call may take, and how often in a row it may fail."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout
        self._failures = 0

    @property
    def left(self) -> float | None:
        """Seconds; None is for ever."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def renew(self) -> None:
        """Something came."""
        self._failures = 0

    async def may_try_again(self, *, at_once: bool) -> bool:
        """Whether another try is worth it, after a pause unless `at_once`; the pause has passed when this returns."""
        self._failures += 1
        if self._failures >= MAX_ATTEMPTS:
            return False
        pause = min(FIRST_BACKOFF_S * 2 ** (self._failures - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
        pause = 0.0 if at_once else pause
        if self.left is not None and self.left <= pause:
            return False
        await asyncio.sleep(pause)
        return True
