"""vLLM's gRPC contract, `vllm.grpc.engine.VllmEngine`, in front of the draft service's own `Generate`.

A request becomes one of ours, and our responses become vLLM's. So limits, queue, failover and metrics are the same. The
stubs come from the package smg-grpc-proto.
"""

import asyncio
import hashlib
import io
import time
import zipfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from draft_service.metrics import verifiers_load
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from draft_service.vllm_request import renamed, translated
from outrider.environment import installed_version, served_name
from outrider.rpc.auth import caller
from outrider.rpc.errors import RequestError, failed_precondition, guarded, internal, invalid_field, write
from outrider.runtime.checkpoint import resolve_folder
from outrider.runtime.gguf import is_gguf
from protos.outrider.v1 import draft_service_pb2, model_pb2, sampling_pb2

_SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
NAME: str = _SERVICE.full_name

if "spec_draft_tokens" not in vllm.GenerateComplete.DESCRIPTOR.fields_by_name:
    raise ImportError("smg-grpc-proto is too old: it has no GenerateComplete.spec_draft_tokens")

# ----------------------------------------------------------------------------------------------------------- responses

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    sampling_pb2.FINISH_REASON_STOP_STRING: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass
class _Sample:
    """What one sample has written so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None
    is_finished: bool = False


class Call:
    """A call in progress: in place of the context it takes our responses, and writes vLLM's to the real one."""

    def __init__(self, request: Any, context: Any, limits: model_pb2.Limits) -> None:
        self.time_remaining = context.time_remaining
        self.invocation_metadata = context.invocation_metadata
        self._context = context
        self._streams = request.stream
        self._number = min(request.sampling_params.n or 1, limits.max_samples)  # more are refused
        self._max_bytes = limits.max_message_bytes
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._prompt_tokens = 0
        self._asks_for_prompt = request.sampling_params.HasField("prompt_logprobs")
        self._prompt_logprobs: Any = None
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        self._work: asyncio.Future[None] | None = None
        self._is_aborted = False
        self._is_writing = False

    async def run(self, generate: Callable[[], Awaitable[None]]) -> None:
        """Runs `generate` until its end, or until `abort`: then all samples end as they are."""
        if not self._is_aborted:
            self._work = asyncio.ensure_future(generate())
            try:
                await self._work
            except asyncio.CancelledError:
                task: Any = asyncio.current_task()
                if task.cancelling() or not self._is_aborted:
                    raise  # the client has left, or the service ends the call
        if self._is_aborted:
            for index in range(self._number):
                if not self._samples[index].is_finished:
                    await self._send(self._complete(index, finish_reason="abort"))

    def abort(self) -> None:
        self._is_aborted = True
        if self._work is not None and not self._is_writing:  # a write that is cancelled would block the next one
            self._work.cancel()

    async def write(self, response: draft_service_pb2.GenerateResponse) -> None:
        """Writes what vLLM's contract has for our response, which may be nothing."""
        message = None
        match response.WhichOneof("event"):
            case "started":
                self._start(response.started.prompt_token_ids)
            case "prompt_logprobs":
                _add_prompt_logprobs(self._prompt_logprobs, response.prompt_logprobs.logprobs)
            case "chunk" if response.chunk.token_ids:
                message = self._add(response.chunk)
            case "finished":
                message = self._finish(response.finished)
        if message is None:
            return
        self._is_writing = True
        try:
            await self._send(message)
        finally:
            self._is_writing = False
        if self._is_aborted:
            raise asyncio.CancelledError

    async def _send(self, message: Any) -> None:
        if (size := message.ByteSize()) > self._max_bytes:
            name = "sampling_params." + ("prompt_logprobs" if self._asks_for_prompt else "logprobs")
            raise invalid_field(
                name,
                f"a response with {name} has {size} bytes; at most {self._max_bytes} (--max-message-bytes of the draft "
                "service): ask for fewer log-probabilities, or for a stream",
                given=size,
                maximum=self._max_bytes,
            )
        await write(self._context, message)

    def _start(self, prompt: Sequence[int]) -> None:
        self._prompt_tokens = len(prompt)
        if self._asks_for_prompt:  # the first token has none
            self._prompt_logprobs = vllm.InputLogProbs(
                token_ids=prompt[:1], token_logprobs=[vllm.InputTokenLogProb()], top_logprobs=[vllm.TopLogProbs()]
            )

    def _add(self, chunk: draft_service_pb2.GenerateChunk) -> Any:
        """Adds new tokens to their sample. Returns the message for a stream."""
        sample = self._samples[chunk.index]
        is_first = not sample.token_ids
        sample.token_ids += chunk.token_ids
        logprobs = _output_logprobs(chunk.logprobs) if chunk.logprobs else None
        if not self._streams:
            if logprobs is not None:
                sample.logprobs = sample.logprobs or vllm.OutputLogProbs()
                sample.logprobs.MergeFrom(logprobs)
            return None
        new = vllm.GenerateStreamChunk(
            index=chunk.index,
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(chunk.token_ids),  # of this chunk, as vLLM's own server counts
            output_logprobs=logprobs,
            input_logprobs=self._prompt_logprobs if is_first else None,
        )
        return vllm.GenerateResponse(chunk=new)

    def _finish(self, finished: draft_service_pb2.GenerateFinished) -> Any:
        usage, statistics = finished.usage, finished.statistics
        asked = finished.HasField("stop_token_id") and finished.stop_token_id in self._stop_token_ids
        return self._complete(
            finished.index,
            finish_reason=_REASONS.get(finished.finish_reason, "length"),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            spec_accepted_tokens=statistics.num_accepted_tokens,
            spec_draft_tokens=statistics.num_draft_tokens,
            # As vLLM's: the model's own end-of-sequence tokens are not named.
            matched_token_id=finished.stop_token_id if asked else None,
            matched_stop_str=finished.stop or None,
        )

    def _complete(self, index: int, **fields: Any) -> Any:
        """The end of a sample, with all its tokens; log-probabilities of a stream came with its chunks.

        The tokens are those that the target wrote: also a stop token, and those of a stop string.
        """
        sample = self._samples[index]
        sample.is_finished = True
        complete = vllm.GenerateComplete(
            index=index,
            output_ids=sample.token_ids,
            completion_tokens=len(sample.token_ids),
            output_logprobs=sample.logprobs,
            input_logprobs=None if self._streams else self._prompt_logprobs,
            **{"prompt_tokens": self._prompt_tokens, **fields},
        )
        return vllm.GenerateResponse(complete=complete)


def _output_logprobs(positions: Iterable[sampling_pb2.PositionLogprobs]) -> Any:
    """Of the target's own distribution, as vLLM's by default."""
    found = vllm.OutputLogProbs()
    for position in positions:
        found.token_logprobs.append(position.token.raw)
        found.token_ids.append(position.token.token_id)
        found.top_logprobs.append(_top_logprobs(position))
    return found


def _add_prompt_logprobs(found: Any, positions: Iterable[sampling_pb2.PositionLogprobs]) -> None:
    for position in positions:
        found.token_logprobs.add(value=position.token.raw)
        found.token_ids.append(position.token.token_id)
        found.top_logprobs.append(_top_logprobs(position))


def _top_logprobs(position: sampling_pb2.PositionLogprobs) -> Any:
    top = position.top
    return vllm.TopLogProbs(values=[each.raw for each in top], token_ids=[each.token_id for each in top])


# ----------------------------------------------------------------------------------------------------------- tokenizer

_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_BUNDLE_CHUNK_BYTES = 1 << 15  # fits into the smallest --max-message-bytes
# The least that a zip file can hold, so that equal files give equal archives.
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def tokenizer_bundle(settings: DraftSettings) -> bytes:
    """The tokenizer's files, and the configurations, of the model's folder as a zip file.

    Raises:
        RequestError: FAILED_PRECONDITION: the model is a GGUF file; INTERNAL: there are none any more.
    """
    if is_gguf(settings.model):
        text = f"{served_name(settings.model)} is a GGUF file; give the client the tokenizer files of its checkpoint"
        raise failed_precondition("UNSPECIFIED", text)
    folder, found = resolve_folder(settings.model, settings.revision, weights=False), io.BytesIO()
    files = [path for name in _TOKENIZER_FILES if (path := folder / name).is_file()]
    files += sorted(path for pattern in ("*.spm", "*.tiktoken") for path in folder.glob(pattern))
    if not files:
        raise internal("INTERNAL", "the model's folder has no tokenizer files any more")
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            archive.writestr(zipfile.ZipInfo(path.name, _ZIP_DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return found.getvalue()


# ------------------------------------------------------------------------------------------------------------ servicer


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The servicer. Calls that it does not offer end with UNIMPLEMENTED."""

    name = NAME

    def __init__(self, drafts: DraftService, settings: DraftSettings) -> None:
        self._drafts = drafts
        self._settings = settings
        self._began = time.monotonic()
        self._last_request = 0.0  # in seconds since 1970
        self._calls: dict[tuple[str, str], list[Call]] = {}  # by caller and request id
        self._bundle: asyncio.Future[bytes] | None = None
        for method in _SERVICE.methods:
            if method.name not in vars(VllmEngine):
                setattr(self, method.name, partial(_refuse, method.name))

    def register(self, server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    @guarded
    async def Generate(self, request: Any, context: Any) -> None:
        self._last_request = time.time()
        pair = self._drafts.ready()
        call = Call(request, context, pair.draft.limits)
        try:
            with self._abortable(caller(context), request.request_id, call):
                ours = translated(request)
                await call.run(lambda: self._drafts.generate(ours, call))
        except RequestError as error:
            raise renamed(error) from error

    @contextmanager
    def _abortable(self, name: str, request_id: str, call: Call) -> Iterator[None]:
        calls = self._calls.setdefault((name, request_id), [])
        calls.append(call)
        try:
            yield
        finally:
            calls.remove(call)
            if not calls:
                del self._calls[name, request_id]

    @guarded
    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends requests of the caller. Ids that it has no request with are ignored: the request may have ended."""
        name = caller(context)
        for request_id in filter(None, request.request_ids):  # requests without an id cannot be named
            for call in self._calls.get((name, request_id), ()):
                call.abort()
        return vllm.AbortResponse()

    @guarded
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        try:
            self._drafts.ready()
        except RequestError as error:
            return vllm.HealthCheckResponse(healthy=False, message=error.message)
        return vllm.HealthCheckResponse(healthy=True, message="the service takes requests")

    @guarded
    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        pair = self._drafts.ready()
        longest = pair.draft.limits.max_sequence_tokens
        return vllm.GetModelInfoResponse(
            model_path=pair.target.name,
            served_model_name=served_name(pair.target.name),
            tokenizer_path=pair.draft.name,
            is_generation=True,
            max_context_length=longest,
            max_req_input_len=min(self._settings.max_prompt_tokens or longest - 1, longest - 1),
            vocab_size=pair.target.vocab_size,
            eos_token_ids=pair.target.eos_token_ids,
        )

    @guarded
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm.GetServerInfoResponse(
            active_requests=self._drafts.limit.running,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._began,
            server_type="outrider",
            data_parallel_size=1,
        )

    @guarded
    async def GetLoads(self, request: Any, context: Any) -> Any:
        """As the metrics with vLLM's names have it."""
        limit = self._drafts.limit
        verifiers = verifiers_load(self._drafts.ready().verifiers.replicas)
        running, waiting = limit.running, limit.waiting + verifiers.waiting
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            token_usage=verifiers.kv_usage,
            utilization=verifiers.kv_usage,
            max_running_requests=limit.maximum,
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=installed_version(),
            dp_rank_count=1,
            loads=[] if request.dp_rank else [load],  # there is rank 0 alone
        )

    @guarded
    async def GetTokenizer(self, request: Any, context: Any) -> None:
        if self._bundle is None or (self._bundle.done() and self._bundle.exception() is not None):
            self._bundle = asyncio.ensure_future(asyncio.to_thread(tokenizer_bundle, self._settings))
        bundle = await asyncio.shield(self._bundle)  # others may wait for it, too
        digest = hashlib.sha256(bundle).hexdigest()
        for begin in range(0, len(bundle), _BUNDLE_CHUNK_BYTES):
            end = begin + _BUNDLE_CHUNK_BYTES
            is_last = end >= len(bundle)
            chunk = common_pb2.GetTokenizerChunk(data=bundle[begin:end], sha256=digest if is_last else "")
            await write(context, chunk)


async def _refuse(name: str, request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"Outrider does not offer the call {name} of {NAME}")
