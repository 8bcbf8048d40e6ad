"""The verifier service: loads the target and builds the parts."""

import asyncio
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import grpc
import structlog

from kernels import verify_path
from kernels.sparse import MAX_SUPPORT
from kernels.verify_path import AUTO, PathUnavailable, VerifyPath, choose, try_out
from outrider.environment import served_name
from outrider.rpc.errors import RequestError, internal
from outrider.runtime.device import find_device
from outrider.runtime.kv_cache import BLOCK_TOKENS, KVPool
from outrider.runtime.tensor_parallel import TensorParallel, read_ranks
from outrider.service.encoder_input import EncoderInputs, smallest_input
from outrider.service.lifecycle import Service, Warm, first_result, in_thread
from outrider.service.loading import (
    Loader,
    build_model_runner,
    load,
    load_encoder_inputs,
    load_share,
    load_tokenizer_alone,
    sequence_tokens,
    uses_llama,
)
from outrider.service.metrics import VllmMetrics
from outrider.service.model_info import describe
from outrider.service.sampling import MAX_STOP_TOKEN_IDS
from outrider.service.settings import SettingsError
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_service.engine import Close, Drain, Open, Submit, VerifierEngine
from verifier_service.metrics import SequenceMetrics, SpeculationMetrics
from verifier_service.request import FEATURES, Round, check_open
from verifier_service.sequence import Reply, TargetSequence, encoded
from verifier_service.service import SERVICE_NAME, VerifierService
from verifier_service.settings import VerifierSettings
from verifier_service.stream import Outbox
from verifier_service.target_runner import MAX_DECODE_TOKENS, verify_rows

_log = structlog.get_logger()

MAX_OUTSTANDING = 8

# Tokens of a warm-up step that is longer than a round: it uses another attention kernel.
SHORT_PROMPT = 64


class VerifierApp(Service):
    """The verifier service."""

    name = SERVICE_NAME

    def __init__(self, settings: VerifierSettings, loader: Loader = load) -> None:
        """Raises `SettingsError` if `--verify-path` or the tensor-parallel ranks are not available."""
        super().__init__()
        self._settings = settings
        self._loader = loader
        ranks = read_ranks(settings.tensor_parallel_size, "verifier_service")
        self._parallel = None if ranks is None else TensorParallel(ranks, timeout=settings.rank_timeout)
        self._lost: Future[str] = Future()
        self._lost.set_running_or_notify_cancel()  # so that a waiting task cannot cancel it
        if self._parallel is not None:
            self._parallel.lost.add_done_callback(self._lose)
        self._path = choose_verify_path(settings)
        self._servicer = VerifierService(settings, SequenceMetrics(self.metrics), self.tracing)
        self.engine: VerifierEngine | None = None

    def register(self, server: grpc.aio.Server) -> None:
        add_VerifierServiceServicer_to_server(self._servicer, server)

    async def load(self, warm: Warm) -> None:
        observer = SpeculationMetrics(self.metrics, self._path.name)
        engine, model = await in_thread(self._build)
        self.metrics.describe(
            service="verifier_service",
            version=model.server_version,
            model=model.name,
            weights=model.weights_fingerprint[:12],
            device=model.device,
            verify_path=self._path.name,
        )
        _log.info("verification", verify_path=self._path.name, reason=self._path.reason, device=model.device)
        self.engine = engine
        engine.lost.add_done_callback(self._lose)
        engine.start()
        inputs = await in_thread(lambda: load_encoder_inputs(self._settings, engine.model_runner.loaded))
        await warm_up(engine, model, inputs)
        engine.observer = observer  # from now on: the warm-up is not counted
        observer.watch(engine.model_runner.pool, engine.scheduler)
        if self._settings.vllm_metrics:
            shown = VllmMetrics(self.metrics.registry, served_name(model.name))
            observer.show_vllm(shown, engine.model_runner.pool, engine.scheduler)
        await warm()
        self._servicer.attach(engine, model, inputs)

    async def drain(self) -> None:
        if self.engine is not None:
            self.engine.post(Drain())

    async def broken(self) -> str:
        return await asyncio.wrap_future(self._lost)

    def _lose(self, reason: Future[str]) -> None:
        with suppress(InvalidStateError):  # already lost
            self._lost.set_result(reason.result())

    def stop(self) -> None:
        parallel = self._parallel
        if parallel is not None and parallel.lost.done():  # the current step may never end
            parallel.end(parallel.lost.result())
            return
        if self.engine is not None:
            self.engine.stop()
        if parallel is not None:
            parallel.end(None)

    def _build(self) -> tuple[VerifierEngine, model_pb2.ModelInfo]:
        try:
            return build_engine(self._settings, self._path, loader=self._loader, parallel=self._parallel)
        except Exception as error:
            if self._parallel is not None:
                self._parallel.end(str(error))
            raise


def choose_verify_path(settings: VerifierSettings) -> VerifyPath:
    """Chooses the implementation of verification and tries it, before the model is loaded.

    Raises:
        SettingsError: the device does not exist, or `--verify-path` does not work on it.
        CheckpointError: --runtime does not fit the model.
    """
    device = find_device("cpu" if uses_llama(settings) else settings.device)  # llama.cpp's logits are on the host
    try:
        path = choose(settings.verify_path, device)
        # On a thread that ends. The main thread would keep its OpenMP pool, and with more threads than processors
        # libgomp lets the pool of the engine sleep between operations.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(try_out, path.name, device).result()
    except PathUnavailable as error:
        advice = f"use --verify-path {AUTO}"
        if settings.verify_path == AUTO:
            advice = "install a C compiler and the headers of Python, or, slower, use --verify-path torch"
        raise SettingsError(f"--verify-path {settings.verify_path}: {error}; {advice}") from error
    return path


def largest_batch(settings: VerifierSettings) -> int:
    """The most tokens of a batch: `--max-batch-tokens`, but at least one whole round."""
    return max(settings.max_batch_tokens, settings.max_gamma + 1)


def build_engine(
    settings: VerifierSettings, path: VerifyPath, loader: Loader = load, *, parallel: TensorParallel | None = None
) -> tuple[VerifierEngine, model_pb2.ModelInfo]:
    """Loads the model and warms it up. `parallel` is None without tensor parallelism.

    Raises:
        CheckpointError: the model cannot be loaded or run.
        SettingsError: the KV cache is too small for one sequence.
        ModelLost: another rank has ended.
    """
    max_batch_tokens = largest_batch(settings)
    behind = partial(verify_rows, verify_path=path.name)
    if parallel is None:
        loaded, tokenizer = loader(settings)
    else:
        tokenizer = load_tokenizer_alone(settings)
        loaded = load_share(settings, parallel)
    tokens = sequence_tokens(settings, loaded)
    built = build_model_runner(
        settings, loaded, tokens, max_batch_tokens=max_batch_tokens, behind=behind, parallel=parallel
    )
    if parallel is not None:
        parallel.command_workers(built.model_runner)
    model = describe(loaded, tokenizer, limits=_limits(settings, tokens, built.model_runner.pool), features=FEATURES)
    engine = VerifierEngine(
        built.model_runner,
        model,
        max_batch_tokens=settings.max_batch_tokens,
        max_linger=settings.max_linger / 1e3,
        threads=settings.threads,
        verify_path=path.name,
        prefix_cache=settings.prefix_cache,
    )
    graphs = 0
    if parallel is None:
        graphs = built.capture(
            settings,
            engine.target_runner.loop,
            tokens=MAX_DECODE_TOKENS,
            with_kernels=path.name == "triton",
            widest=settings.max_gamma + 1,
            max_batch_tokens=max_batch_tokens,
        )
    built.log_memory(graphs)
    built.model_runner.warm_up([1, settings.max_gamma + 1, SHORT_PROMPT])
    verify_path.warm_up(path.name, loaded.device, loaded.dtype, model.vocab_size, loaded.vocab_size)
    return engine, model


def _limits(settings: VerifierSettings, sequence_tokens: int, pool: KVPool) -> model_pb2.Limits:
    return model_pb2.Limits(
        max_gamma=settings.max_gamma,
        max_support=MAX_SUPPORT,
        max_message_bytes=settings.max_message_bytes,
        max_sequences=settings.max_sequences,
        max_sequence_tokens=sequence_tokens,
        max_outstanding=MAX_OUTSTANDING,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        kv_blocks=pool.blocks.count,
        kv_block_tokens=BLOCK_TOKENS,
    )


_NAME = "warm-up"


async def warm_up(engine: VerifierEngine, model: model_pb2.ModelInfo, inputs: EncoderInputs | None = None) -> None:
    """Runs one proposal and one `Decode` on a started engine. `inputs` are those of the model's encoder.

    Raises:
        RequestError: no verdict: the step failed, its logits are NaN or infinite, or the engine ended.
    """
    replies: asyncio.Queue[Reply] = asyncio.Queue()
    outbox = Outbox(asyncio.get_running_loop())
    engine.flush = outbox.flush
    most = model.limits.max_sequence_tokens
    prompt = [0] * max(1, min(2, most - 2))
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=prompt,
        max_new_tokens=min(model.limits.max_gamma + 2, most - len(prompt)),
        ignore_eos=True,
        request_id=_NAME,
        cache_salt=_NAME,
    )
    opening.sampling.seed = 0
    opening.sampling.rule = sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
    if inputs is not None:
        opening.encoder_input.CopyFrom(smallest_input(model.encoder))
    checked = check_open(opening, model, engine.model_runner.loaded.generation_rules)
    if inputs is not None:
        checked = replace(checked, encoder_input=inputs.tensor(opening.encoder_input))
    sequence = TargetSequence(_NAME, checked, model.vocab_size, partial(outbox.put, replies))
    engine.post(Open(sequence))
    try:
        if opening.max_new_tokens > 1:
            gamma = min(model.limits.max_gamma, opening.max_new_tokens - 1)
            proposal = Round(
                1,
                len(prompt),
                PrefixHash(prompt).digest(),
                seen_round=0,
                tokens=(0,) * gamma,
                distributions=(None,) * gamma,
            )
            engine.post(Submit(sequence, proposal))
            verdict = await _verdict(engine, replies)
            if verdict.finish_reason:
                return
            prompt += verdict.token_ids
        engine.post(Submit(sequence, Round(2, len(prompt), PrefixHash(prompt).digest(), seen_round=1, decode=1)))
        await _verdict(engine, replies)
    finally:
        engine.post(Close(sequence))


async def _verdict(engine: VerifierEngine, replies: asyncio.Queue[Reply]) -> speculation_pb2.Verdict:
    """The next verdict; skips notices."""
    while True:
        reply = encoded(await first_result(engine, replies.get()))
        if isinstance(reply, RequestError):
            raise internal(reply.reason, f"the first step of the target failed: {reply.message}")
        if reply is None:
            raise internal(
                "INTERNAL",
                "the first step of the target failed: it ended without a verdict; see the log above this line",
            )
        if reply.WhichOneof("kind") == "verdict":
            return reply.verdict
