"""The draft service: loads the draft, connects to the verifiers, and builds the parts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import structlog

from draft_service.drafters.base import Drafter, DrafterKind, DraftError, DraftSequence
from draft_service.drafters.build import (
    cheap_drafters,
    check_settings,
    default_kind,
    guarded,
    loads_model,
    model_drafters,
)
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.guard import PROBE, PROBE_GAMMA, GuardedDrafter
from draft_service.drafters.outcome_cache import MOST_FORKS
from draft_service.drafters.staged import Staging
from draft_service.failover import FailoverBudget, FailureKind, Verifiers
from draft_service.metrics import FailoverMetrics, show_drafters, show_held, show_verifiers, show_vllm
from draft_service.pair import Pair
from draft_service.replicas import Replicas
from draft_service.service import SERVICE_NAME, DraftService
from draft_service.settings import DraftSettings
from draft_service.speculation import GammaController
from kernels.sparse import SparseConfig
from kernels.verify import implementation_for
from outrider.environment import served_name
from outrider.rpc.auth import OwnToken
from outrider.rpc.channel import RenewedChannel
from outrider.rpc.timeouts import NOTICE_SECONDS
from outrider.rpc.tls import TLS, ChannelTLS, certificate_and_key, from_files
from outrider.runtime.loader import LoadedModel
from outrider.runtime.tokenizer import Tokenizer
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.encoder_input import EncoderInputs, smallest_input
from outrider.service.lifecycle import Service, Warm, first_result, in_thread
from outrider.service.loading import (
    Built,
    Loader,
    build_model_runner,
    load,
    load_encoder_inputs,
    load_generation_config,
    load_tokenizer_alone,
    sequence_tokens,
)
from outrider.service.metrics import VllmMetrics
from outrider.service.model_info import describe, describe_tokenizer
from outrider.service.sampling import RULES
from outrider.service.settings import SettingsError, check_plaintext
from protos.outrider.v1 import model_pb2
from protos.outrider.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_log = structlog.get_logger()

FEATURES = (
    "chat",
    "drafters",
    "emission",
    "encoder",
    "fill_context",
    "fixed_rounds",
    "held_tokens",
    "logprobs",
    "message_names",
    "n",
    "penalties",
    "prompt_logprobs",
    "propose",
    "report_probabilities",
    "resume",
    "round_reports",
    "speculation_policies",
    "stop_strings",
    "template_arguments",
    "time_limit",
    "tokenizer",
)


class DraftApp(Service):
    """The draft service."""

    name = SERVICE_NAME

    def __init__(self, settings: DraftSettings, loader: Loader = load) -> None:
        """Raises `SettingsError` if TLS settings for verifiers are incomplete or contradict each other, if their token
        cannot be read, or if the stubs of vLLM's contract are missing.
        """
        super().__init__()
        self._settings = settings
        self._loader = loader
        self._tls = verifier_tls(settings)
        path = settings.verifier_token_file
        self._token = None if path is None else from_files("--verifier-token-file", lambda: OwnToken(path))
        self._servicer = DraftService(settings, self.metrics, self.tracing)
        self._vllm = vllm_engine(settings, self._servicer) if settings.vllm_grpc else None
        self.also = () if self._vllm is None else (self._vllm.name,)
        self._replicas = Replicas(
            settings.verifier,
            self._connect,
            timeout=settings.verifier_timeout,
            resolve_interval=settings.verifier_resolve_interval,
        )
        self.engine: DraftEngine | None = None

    def register(self, server: grpc.aio.Server) -> None:
        add_DraftServiceServicer_to_server(self._servicer, server)
        if self._vllm is not None:
            self._vllm.register(server)

    async def load(self, warm: Warm) -> None:
        settings = self._settings
        check_settings(settings)
        if settings.verifier_timeout <= NOTICE_SECONDS:
            _log.warning(
                "--verifier-timeout is short",
                seconds=settings.verifier_timeout,
                effect="sequences that wait at a verifier move to another one before it tells them so",
                action=f"raise it above {NOTICE_SECONDS:g} s",
            )
        built: Built | None = None
        if loads_model(settings):
            built, tokenizer = await in_thread(lambda: load_built(settings, self._loader))
        else:
            tokenizer = await in_thread(lambda: load_tokenizer_alone(settings))
        await in_thread(lambda: tokenizer.longest_token_bytes)  # computed once, about 0.1 s; checks of requests use it
        await warm()  # a restart would not help while verifiers are missing
        verifiers = self._verifiers()
        loaded = None if built is None else built.model_runner.loaded
        default = default_kind(settings, loaded)
        draft = model_info(loaded, tokenizer, settings)
        target = await verifiers.replicas.match(draft)
        limit_by(draft, target, has_logits=built is not None)
        compare_encoders(draft.encoder, target.encoder)
        sparse = SparseConfig(keep_mass=settings.keep_mass, max_support=draft.limits.max_support)
        inputs, prompts = await in_thread(lambda: load_inputs(settings, loaded, target))
        probe = PROBE if inputs is None else replace(PROBE, encoder_input=inputs.tensor(smallest_input(draft.encoder)))
        drafters = await in_thread(lambda: cheap_drafters(settings, tokenizer, target, sparse))
        if built is not None:
            self.engine = await in_thread(lambda: build_engine(built, target, sparse, settings))
            self.engine.start()
            drafters |= model_drafters(settings, self.engine, drafters)
            await warm_up(drafters[DrafterKind.MODEL], self.engine, probe)
        chosen = guarded(drafters, settings, target, sparse, probe=probe)
        pair = Pair(
            drafters=chosen,
            default=default,
            gamma_controller=GammaController(self.metrics),
            verifiers=verifiers,
            tokenizer=tokenizer,
            draft=draft,
            target=target,
            encoder_inputs=inputs,
            prompts=prompts,
            generation_rules=None if loaded is None else loaded.generation_rules,
        )
        self._show(pair, chosen)
        self._servicer.attach(pair)

    def _verifiers(self) -> Verifiers:
        """Their metrics are shown while the service waits for one."""
        budget = FailoverBudget(self._settings.max_sequences)
        failover_metrics = FailoverMetrics(self.metrics, FailureKind)
        show_verifiers(self.metrics, self._replicas, lambda: budget.tokens)
        return Verifiers(self._replicas, budget, self._settings.failover_timeout, failover_metrics)

    def _show(self, pair: Pair, drafters: Mapping[DrafterKind, GuardedDrafter]) -> None:
        """Adds the metrics of the pair."""
        draft, limit = pair.draft, self._servicer.limit
        show_held(self.metrics, limit, None if self.engine is None else self.engine.model_runner.pool)
        if self._settings.vllm_metrics:
            shown = VllmMetrics(self.metrics.registry, served_name(pair.target.name))
            show_vllm(shown, self._servicer.metrics, limit, pair.verifiers.replicas)
        self.metrics.describe(
            service="draft_service",
            version=draft.server_version,
            model=draft.name,
            weights=draft.weights_fingerprint[:12],
            device=draft.device,
        )
        show_drafters(self.metrics, drafters, self.engine)

    def _connect(self, address: str, name: str) -> RenewedChannel[Any]:
        return RenewedChannel(
            address,
            VerifierServiceStub,
            max_message_bytes=self._settings.max_message_bytes,
            tls=self._tls,
            token=self._token,
            name=name,  # proxies and certificates know the verifier by it
        )

    async def broken(self) -> str:
        """Returns once the target is lost: a new process forms a pair with the one that the verifiers have now."""
        mismatch = await self._replicas.lost_target(self._settings.failover_timeout)
        return f"no verifier at {self._replicas.names} runs the target of this pair any more: {mismatch}"

    async def drain(self) -> None:
        """Refuses queued calls. Calls in progress finish."""
        self._servicer.limit.drain()

    def stop(self) -> None:
        self._replicas.close()
        if self.engine is not None:
            self.engine.stop()


def load_built(settings: DraftSettings, loader: Loader) -> tuple[Built, Tokenizer]:
    """Loads the draft and its tokenizer, allocates its KV cache, and warms it up.

    Raises:
        CheckpointError: the model cannot be loaded or run.
        SettingsError: the KV cache is too small for one sequence.
    """
    loaded, tokenizer = loader(settings)
    length = sequence_tokens(settings, loaded)
    # A step holds pieces of prompts, and of each sequence that drafts the last token and the masks after it.
    tokens = settings.tokens_per_pass if loaded.mask_token is not None else 1
    most = max(tokens, 1 + settings.staged_guesses)  # in staged drafting, the last token and the guesses
    largest = settings.prefill_tokens + settings.max_sequences * most
    built = build_model_runner(
        settings, loaded, length, max_batch_tokens=largest, most_sequences=settings.max_sequences, forks=MOST_FORKS
    )
    built.model_runner.warm_up((*range(1, 2 * tokens + 1), 64) if tokens > 1 else (1, 2, 64))
    return built, tokenizer


def load_inputs(
    settings: DraftSettings, loaded: LoadedModel | None, target: model_pb2.ModelInfo
) -> tuple[EncoderInputs | None, DecoderPrompts | None]:
    """The inputs of the draft's encoder, and the prompts of the decoder; None without an encoder."""
    if not target.HasField("encoder"):
        return None, None
    start = target.encoder.decoder_prompt_token_ids[0]
    if loaded is None:
        return None, DecoderPrompts.read(load_generation_config(settings), start)
    return load_encoder_inputs(settings, loaded), DecoderPrompts.read(loaded.model.generation_config, start)


def build_engine(
    built: Built, target: model_pb2.ModelInfo, config: SparseConfig, settings: DraftSettings
) -> DraftEngine:
    """The draft's engine, not started.

    Raises:
        CheckpointError: too little memory for CUDA graphs.
    """
    model_runner = built.model_runner
    engine = DraftEngine(
        model_runner,
        vocab_size=target.vocab_size,
        config=config,
        prefill_tokens=settings.prefill_tokens,
        staging=Staging(settings.staged_guesses, model_runner.loaded.vocab_size),
        threads=settings.threads,
        prefix_cache=settings.prefix_cache,
    )
    graphs = built.capture(
        settings,
        engine.decode_loop,
        tokens=min(settings.max_gamma, target.limits.max_gamma),
        with_kernels=implementation_for(model_runner.loaded.device) == "triton",
        # A step that begins a round has one or two tokens; in parallel drafting up to s + 1, and s - 1 masks.
        widest=2 * (settings.tokens_per_pass if engine.mask_token is not None else 1),
    )
    built.log_memory(graphs)
    return engine


def model_info(loaded: LoadedModel | None, tokenizer: Tokenizer, settings: DraftSettings) -> model_pb2.ModelInfo:
    """`ModelInfo` of the draft before a target is known; `loaded` is None without a draft model."""
    how: Any = {
        "limits": model_pb2.Limits(
            max_gamma=settings.max_gamma,
            max_support=settings.max_support,
            max_message_bytes=settings.max_message_bytes,
            max_sequences=settings.max_sequences,
            max_outstanding=1,
            max_samples=min(settings.max_samples, settings.max_sequences),
            max_stop_strings=settings.max_stop_strings,
            max_stop_string_chars=settings.max_stop_string_chars,
        ),
        "features": FEATURES,
    }
    return (
        describe_tokenizer(settings.model, tokenizer, **how) if loaded is None else describe(loaded, tokenizer, **how)
    )


def limit_by(draft: model_pb2.ModelInfo, target: model_pb2.ModelInfo, *, has_logits: bool) -> None:
    """Limits the draft's `ModelInfo` to the rules and limits of the target. Lossy rules need logits of the draft."""
    limits, bound = draft.limits, target.limits
    limits.max_gamma = min(limits.max_gamma, bound.max_gamma)
    limits.max_support = min(limits.max_support, bound.max_support)
    limits.max_sequence_tokens = bound.max_sequence_tokens
    limits.max_stop_token_ids = bound.max_stop_token_ids
    lossy = () if has_logits else draft.lossy_rules
    draft.rules[:] = [rule for rule in target.rules if rule in RULES and rule not in lossy]
    draft.lossy_rules[:] = [rule for rule in draft.lossy_rules if rule in draft.rules]
    draft.default_rule = target.default_rule


def compare_encoders(draft: model_pb2.EncoderInfo, target: model_pb2.EncoderInfo) -> None:
    """Logs a warning if the draft's encoder takes shorter inputs than the target's. Without a draft model, `draft` is
    empty.
    """
    speech = draft.kind == model_pb2.ENCODER_KIND_SPEECH
    longest = (draft.frames, target.frames) if speech else (draft.max_positions, target.max_positions)
    if 0 < longest[0] < longest[1]:
        _log.warning(
            "the draft's encoder takes shorter inputs than the target's",
            unit="frames of 10 ms" if speech else "tokens",
            draft=longest[0],
            target=longest[1],
            effect="longer inputs are written by the target without a draft",
        )


def verifier_tls(settings: DraftSettings) -> ChannelTLS | None:
    """TLS to verifiers; None is plaintext.

    Raises:
        SettingsError: settings contradict each other, a file is invalid, or a remote verifier would be called in
            plaintext without `--plaintext`.
    """
    cert, key = settings.verifier_tls_cert, settings.verifier_tls_key
    certificate_and_key("--verifier-tls-cert", cert, "--verifier-tls-key", key)
    ca, name = settings.verifier_tls_ca, settings.verifier_tls_name
    if ca is None:
        for flag, given in (("--verifier-tls-cert", cert), ("--verifier-tls-name", name)):
            if given is not None:
                raise SettingsError(f"{flag} needs --verifier-tls-ca, which turns TLS to verifiers on")
        for address in settings.verifier:
            check_plaintext("--verifier", address, settings.plaintext, "give --verifier-tls-ca")
        return None
    return from_files(
        "--verifier-tls-ca, --verifier-tls-cert or --verifier-tls-key", lambda: ChannelTLS(TLS(ca, cert, key, name))
    )


def vllm_engine(settings: DraftSettings, servicer: DraftService) -> Any:
    """The servicer of vLLM's contract.

    Raises:
        SettingsError: the package with its stubs is missing, too old, or does not fit the installed gRPC.
    """
    try:
        from draft_service.vllm_service import VllmEngine
    except Exception as error:  # besides ImportError: of generated code, about versions
        raise SettingsError(
            f"--vllm-grpc needs the package smg-grpc-proto (pip install -e '.[vllm]' in a clone of Outrider): {error}"
        ) from error
    return VllmEngine(servicer, settings)


async def warm_up(drafter: Drafter, engine: DraftEngine, probe: DraftSequence) -> None:
    """Drafts a proposal for the sequence `probe`. A failure is logged only: the target can write without a draft.

    Raises:
        RequestError: the engine has ended.
    """
    drafting = drafter.open(probe)
    try:
        if error := (await first_result(engine, drafting.propose(PROBE_GAMMA))).error:
            raise error
    except DraftError as error:
        _log.warning("drafting failed", at="warm-up", reason=str(error), effect="the target writes without a draft")
    finally:
        drafting.close()
