"""Clients of one draft service, or of several: asynchronous, and for code without an event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from outrider.client.audio import FRAME_S, AudioSource, Samples, read_samples, speech_encoder
from outrider.client.endpoints import Endpoints, split
from outrider.client.errors import PairMismatch, explained, refused, typed
from outrider.client.events import Completion, Detokenized, Event, Tokenized, TokenizerInfo, read
from outrider.client.request import (
    CommonOptions,
    Options,
    Prompt,
    TextOrMessages,
    TokenizeOptions,
    build,
    build_detokenize,
    build_tokenize,
)
from outrider.client.resume import Call, Generation
from outrider.client.transcription import AsyncTranscription, Transcription
from outrider.rpc.channel import check_plaintext
from outrider.rpc.errors import UNSPECIFIED, unavailable
from outrider.rpc.timeouts import InactivityTimer
from outrider.rpc.tls import TLS
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import verifier_service_pb2

T = TypeVar("T")

_PROBE_TIMEOUT_S = 5.0


class AsyncClient:
    r"""A client of draft services, for any number of calls at once. Make it inside the event loop that uses it.

    With several services, calls go to them in turn; those that failed in the last 10 s come last. If a service dies,
    drains or is full, its calls continue at another one, or at the same one later, after the tokens delivered so far.
    A call with several samples continues only if none has begun. See "Retries and several services" in
    docs/reference/client.md.

    Args:
        address: `HOST:PORT` of the draft service; or several, as a list or separated by commas. A DNS name stands for
            all its addresses; it is resolved again every 30 s and after each failure.
        timeout: seconds of a call, retries included; None: no limit. Calls may override it.
        retry_timeout: seconds that a call retries while no draft service accepts it; None: until its timeout. 0: each
            address once.
        retry: whether a call that ends as UNAVAILABLE, or as RESOURCE_EXHAUSTED because the service is full, is retried
            or continued.
        silence: seconds without a message after which a call continues at another service, if there is one. A service
            without news sends an empty message every 5 s.
        tls: TLS settings; None: plaintext. Its files and the token's are reloaded when they change.
        token_file: file with the bearer token of every call: its first line that is not empty and not a `#` comment.
        plaintext: allow plaintext to addresses that are not loopback.

    Raises:
        ValueError: no address, or a malformed one; a negative number of seconds, or a silence of 0; a file is
            missing or has the wrong content; or an address is not loopback, and neither `tls` nor `plaintext` is given.

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
        retry_timeout: float | None = None,
        retry: bool = True,
        silence: float | None = 30.0,
        tls: TLS | None = None,
        token_file: str | Path | None = None,
        plaintext: bool = False,
    ):
        names = split(address)
        if tls is not None and plaintext:
            raise ValueError("tls and plaintext are both given; leave one of them out")
        for name in names:
            if tls is None and not plaintext:
                check_plaintext(name, "give tls=TLS(...), or plaintext=True")
        for name, seconds in (("timeout", timeout), ("retry_timeout", retry_timeout), ("silence", silence)):
            if seconds is not None and not seconds >= 0:  # NaN is not
                raise ValueError(f"{name} is {seconds:g}; it must be at least 0, in seconds, or None")
        if silence == 0:
            raise ValueError("silence is 0; it must be above 0, in seconds, or None")
        self.address = ",".join(names)
        self._uses_tls = tls is not None
        self._timeout = timeout
        self._retry_timeout = retry_timeout
        self._retry = retry
        self._silence = silence
        self._endpoints = Endpoints(names, tls, token_file)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every channel; calls in progress are cancelled."""
        await self._endpoints.close()

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Streams one generation: `Started`, then `Chunk`s, then a `Finished` for each sample; and `Queued` while it
        waits in the queue. With `prompt_logprobs`, `PromptLogprobs` come before the first `Chunk`.

        Leaving the iterator, by `aclose`, by cancelling its task or by dropping it, cancels the call at both services.

        Args:
            prompt: text, token ids, or messages. For an encoder–decoder model it is the input of the encoder; one that
                takes speech has the option `audio` or `features` instead.
            timeout: seconds for this call; None: the client's.
            options: see `Options`.

        Raises:
            ImportError: `audio` or `features` without the extra `audio`.
            OutriderError: a subclass by status code; see `outrider.client.errors`.
            TypeError: an unknown option.
        """
        timeout = self._timeout if timeout is None else timeout
        began = time.monotonic()
        request = build(prompt, await self._with_samples(options, timeout))
        generation = Generation(request, timeout, self._retry_timeout, spent=time.monotonic() - began)
        generation.metadata = tuple((options.get("metadata") or {}).items())
        while True:
            call = None
            try:
                if generation.needs_model:
                    description = await self._attempt(generation, "GetModel", pb.DraftServiceGetModelRequest())
                    generation.learn(description.target)
                if (end := generation.ended()) is not None:
                    yield end
                    return
                call, silence = await self._begin(generation, "Generate", generation.request())
                responses = aiter(call)
                with InactivityTimer(silence) as timer:
                    while (response := await timer.wait_for(anext(responses, None))) is not None:
                        for event in read(response):
                            for each in generation.take(event):
                                yield each
                return
            except (grpc.RpcError, TimeoutError) as error:
                if generation.is_over:
                    return
                await self._recover(generation, error)
            finally:
                if call is not None:
                    call.cancel()

    async def complete(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """`generate`, collected. Same arguments, same errors.

        By default the services send the events of each second together (`joined_responses`), which takes less of their
        time.
        """
        options.setdefault("joined_responses", True)
        events = [event async for event in self.generate(prompt, timeout=timeout, **options)]
        return Completion.of(events)

    async def get_model(self, *, timeout: float | None = None) -> pb.DraftServiceGetModelResponse:
        """Describes the pair: `model` is the draft model, `target` the target.

        Raises:
            OutriderError: a subclass by status code.
        """
        response = await self._ask("GetModel", pb.DraftServiceGetModelRequest(), timeout)
        return cast("pb.DraftServiceGetModelResponse", response)

    async def tokenize(
        self, prompt: TextOrMessages, *, timeout: float | None = None, **options: Unpack[TokenizeOptions]
    ) -> Tokenized:
        """The tokens of a text or of messages, as `generate` makes them.

        Args:
            prompt: text, or messages.
            timeout: seconds for this call; None: the client's.
            options: see `TokenizeOptions`.

        Raises:
            OutriderError: a subclass by status code.
        """
        return Tokenized.of(await self._ask("Tokenize", build_tokenize(prompt, options), timeout))

    async def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> Detokenized:
        """The text of tokens.

        Raises:
            OutriderError: a subclass by status code.
        """
        return Detokenized.of(await self._ask("Detokenize", build_detokenize(token_ids, keep_special_tokens), timeout))

    async def tokenizer(self, *, timeout: float | None = None) -> TokenizerInfo:
        """Describes the tokenizer of the pair.

        Raises:
            OutriderError: a subclass by status code.
        """
        return TokenizerInfo.of(await self._ask("GetTokenizer", pb.GetTokenizerRequest(), timeout))

    async def _ask(self, method: str, request: Any, timeout: float | None) -> Any:
        """The response to a single request, with retries."""
        call = Call(self._timeout if timeout is None else timeout, self._retry_timeout)
        while True:
            try:
                return await self._attempt(call, method, request)
            except (grpc.RpcError, TimeoutError) as error:
                await self._recover(call, error)

    def transcribe(
        self,
        audio: AudioSource,
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool = False,
        sample_rate: int | None = None,
        timeout: float | None = None,
        **options: Unpack[CommonOptions],
    ) -> AsyncTranscription:
        """Writes down speech of any length: iterate the result for its `Segment`s, or await its `wait`.

        The work begins when the result is iterated.

        Audio longer than the model takes at once is cut into windows, as transformers' Whisper does it with
        `generate(return_timestamps=True)`: the next window begins at the last timestamp that the model wrote. Unlike
        there, each window's features are computed from its own audio alone, no window is repeated at a higher
        temperature, and none sees the text before it.

        Args:
            audio: a path, the bytes of a file, or an array with its `sample_rate`.
            language: of the speech; None: the model's default.
            task: `transcribe` or `translate`; None: `transcribe`.
            timestamps: whether the model writes timestamps for audio that it takes at once. For longer audio it always
                does. Without them such audio is one segment.
            sample_rate: of an array.
            timeout: seconds for each window; None: the client's.
            options: see `CommonOptions`. The default of `temperature` is 0, and that of `max_new_tokens` as many as the
                model can write.
        """
        given = {"language": language, "task": task, "timestamps": timestamps, "sample_rate": sample_rate}
        return AsyncTranscription(self, audio, timeout, {**options, **given})

    async def _with_samples(self, options: Mapping[str, Any], timeout: float | None) -> Mapping[str, Any]:
        """The options, with `audio` as the model takes it."""
        audio = options.get("audio")
        if audio is None or isinstance(audio, Samples):
            return options
        encoder = speech_encoder((await self.get_model(timeout=timeout)).target)
        samples = await asyncio.to_thread(read_samples, audio, options.get("sample_rate"), encoder.sample_rate)
        if samples.frames > encoder.frames:
            raise refused(
                "audio",
                f"audio has {samples.seconds:.2f} s; at most {encoder.frames * FRAME_S:g} s at once with this "
                "model: call `transcribe`, which takes any length",
            )
        return {**options, "audio": samples.part(0, encoder.frames), "sample_rate": None}

    async def _attempt(self, call: Call, method: str, request: Any) -> Any:
        response, silence = await self._begin(call, method, request)
        async with asyncio.timeout(silence):
            return await response

    async def _begin(self, call: Call, method: str, request: Any) -> tuple[Any, float | None]:
        """Begins an attempt. Returns it with its silence timeout: None without another endpoint."""
        others = self._retry and len(await self._endpoints.addresses(call.time_left)) > 1
        # Else the texts of clients that ask for the model before each one would all go to every second address.
        call.address = await self._endpoints.choose(takes_turn=method == "Generate", within=call.time_left)
        begun = self._endpoints.begin(call.address, method, request, timeout=call.time_left, metadata=call.metadata)
        return begun, self._silence if others else None

    async def _recover(self, call: Call, cause: grpc.RpcError | TimeoutError) -> None:
        """Returns when the attempt that ended by `cause` should be repeated: after a pause, or at once elsewhere.

        Raises:
            OutriderError: it should not.
        """
        if isinstance(cause, grpc.RpcError):
            failure = await explained(cause, call.address, call.timeout, uses_tls=self._uses_tls)
        else:
            silent = f"the draft service at {call.address} sent nothing for {self._silence:g} s"
            failure = typed(unavailable(UNSPECIFIED, silent))
        if failure.code is grpc.StatusCode.UNIMPLEMENTED and await self._is_verifier(call.address):
            failure.message = (
                f"{call.address} is a verifier, not a draft service; give the address of the draft service in front of "
                "it"
            )
        call.failed(failure)
        may_help = failure.is_transient or isinstance(failure, PairMismatch)  # perhaps of this address alone
        if may_help:
            self._endpoints.failed(call.address)
        addresses = await self._endpoints.addresses(call.time_left)
        untried = self._endpoints.has_fresh() or call.has_untried(addresses)
        elsewhere = call.failures < len(addresses) and untried
        may = self._retry and may_help and call.can_go_on and not call.is_hopeless(addresses)
        if not (may and await call.pause(failure, elsewhere=elsewhere)):
            raise call.described(failure, addresses) from cause

    async def _is_verifier(self, address: str) -> bool:
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            await self._endpoints.begin(address, "GetModel", request, timeout=_PROBE_TIMEOUT_S, service="verifier")
        except grpc.RpcError:
            return False
        return True


class Client:
    """`AsyncClient` for code without an event loop: it runs one in a thread. Any thread may call it.

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
        retry_timeout: float | None = None,
        retry: bool = True,
        silence: float | None = 30.0,
        tls: TLS | None = None,
        token_file: str | Path | None = None,
        plaintext: bool = False,
    ):
        """As `AsyncClient`."""
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._lock = threading.RLock()  # no work begins after `close` has; the garbage collector may come in between
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

        async def make() -> AsyncClient:  # in that thread: grpc.aio binds a channel to the running loop
            return AsyncClient(
                address, timeout=timeout, retry_timeout=retry_timeout, retry=retry, silence=silence,
                tls=tls, token_file=token_file, plaintext=plaintext,
            )  # fmt: skip

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

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes every channel and ends the thread; calls in progress are cancelled. May be called twice."""
        with self._lock:
            end = self._begin(self._end())
            self._is_closed = True
        if end is not None:
            end.result()
            self._stop()

    async def _end(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.close()
        await self._loop.shutdown_asyncgens()

    def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """As `AsyncClient.generate`. Closing or dropping the iterator cancels the call."""
        return self._each(self._client.generate(prompt, timeout=timeout, **options))

    def complete(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """As `AsyncClient.complete`."""
        return self._run(self._client.complete(prompt, timeout=timeout, **options))

    def transcribe(
        self,
        audio: AudioSource,
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool = False,
        sample_rate: int | None = None,
        timeout: float | None = None,
        **options: Unpack[CommonOptions],
    ) -> Transcription:
        """As `AsyncClient.transcribe`. Closing or dropping the iterator cancels the call."""
        transcription = self._client.transcribe(
            audio, language=language, task=task, timestamps=timestamps, sample_rate=sample_rate,
            timeout=timeout, **options,
        )  # fmt: skip
        return Transcription(transcription, self._each(transcription.stream))

    def get_model(self, *, timeout: float | None = None) -> pb.DraftServiceGetModelResponse:
        """As `AsyncClient.get_model`."""
        return self._run(self._client.get_model(timeout=timeout))

    def tokenize(
        self, prompt: TextOrMessages, *, timeout: float | None = None, **options: Unpack[TokenizeOptions]
    ) -> Tokenized:
        """As `AsyncClient.tokenize`."""
        return self._run(self._client.tokenize(prompt, timeout=timeout, **options))

    def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, timeout: float | None = None
    ) -> Detokenized:
        """As `AsyncClient.detokenize`."""
        return self._run(self._client.detokenize(token_ids, keep_special_tokens=keep_special_tokens, timeout=timeout))

    def tokenizer(self, *, timeout: float | None = None) -> TokenizerInfo:
        """As `AsyncClient.tokenizer`."""
        return self._run(self._client.tokenizer(timeout=timeout))

    def _each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items of a generator that runs in the thread of the loop."""
        # An interrupt leaves a step that is still being cancelled: close the iterator after it
        one_at_a_time = asyncio.Lock()

        async def step() -> T | None:
            async with one_at_a_time:
                return await anext(items, None)

        async def close() -> None:
            async with one_at_a_time:
                await items.aclose()

        try:
            while (item := self._run(step())) is not None:
                yield item
        finally:
            closing = self._begin(close())
            # The garbage collector runs in any thread, and the loop must not wait for itself.
            if closing is not None and threading.current_thread() is not self._thread:
                closing.result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Begins work in the thread of the loop; None if the client is closed, or of the process before a fork."""
        with self._lock:
            if not self._is_closed and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        return None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        if future is None:
            why = "closed" if self._is_closed else "of the process that this one was forked from"
            raise RuntimeError(f"the client is {why}; make a new one")
        try:
            return future.result()
        finally:
            # An interrupt arrives here while the call continues in the other thread.
            future.cancel()
