"""Settings of the draft service only."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from outrider.runtime.skip_layers import read_layers
from outrider.service.settings import Listener, ServiceAddress, ServiceSettings, split_commas

Addresses = Annotated[tuple[ServiceAddress, ...], NoDecode, BeforeValidator(split_commas), Field(min_length=1)]


def _layers(text: str) -> str:
    read_layers(text)
    return text


class DraftSettings(ServiceSettings):
    """The draft service: writes text with a draft model here and a target model at a verifier, over gRPC."""

    model_config = SettingsConfigDict(cli_prog_name="python -m draft_service")

    listen: Listener = Field("127.0.0.1:50051", description="HOST:PORT or unix:PATH to listen at; port 0: a free one")
    verifier: Addresses = Field(
        ("127.0.0.1:50052",),
        description="HOST:PORT or unix:PATH of the verifier; with several, they are replicas; a DNS name stands "
        "for all its addresses",
    )
    verifier_tls_ca: Path | None = Field(
        None, description="PEM file of the CA of the verifiers' certificates; turns TLS on; default: plaintext"
    )
    verifier_tls_cert: Path | None = Field(None, description="PEM file of the certificate to present to verifiers")
    verifier_tls_key: Path | None = Field(
        None, description="PEM file of that certificate's private key, without a passphrase"
    )
    verifier_tls_name: str | None = Field(
        None, description="name in the verifiers' certificates; default: the host in --verifier"
    )
    verifier_token_file: Path | None = Field(
        None,
        description="file with the bearer token of every call to the verifiers, where they have --auth-token-file: its "
        "first line that is not empty and not a # comment",
    )
    verifier_resolve_interval: float = Field(
        10.0,
        gt=0,
        description="seconds between resolutions of the verifiers' DNS names; the loss of a verifier causes one too",
    )
    drafter: Literal["model", "parallel", "staged", "ngram", "lookup", "random", "none"] = Field(
        "model",
        description="source of proposed tokens for requests that name none; only model, parallel and staged load the "
        "weights of --model, not just its tokenizer; unset, a --model with a mask token drafts as parallel",
    )
    tokens_per_pass: int = Field(
        8,
        ge=1,
        le=256,
        description="with the drafter parallel: tokens that one pass of the draft model drafts; 1 drafts as model does",
    )
    skip_layers: Annotated[str, AfterValidator(_layers)] | None = Field(
        None,
        description="layers of --model to leave out, from 0 on: 3,5-7, or every-3 for every third; with the target as "
        "--model it is its own draft; default: none",
    )
    staged_by: Literal["lookup", "ngram"] = Field(
        "lookup", description="with the drafter staged: source of the tokens that the draft model checks"
    )
    staged_guesses: int = Field(
        8, ge=1, le=256, description="with the drafter staged: maximum tokens that --staged-by gives at once"
    )
    draft_temperature: float | None = Field(
        None,
        ge=0,
        le=100,
        description="temperature of the drafters model, parallel, staged and ngram; 0, or 0.000001 to 100; default: "
        "the request's",
    )
    draft_timeout: int = Field(
        10_000,
        ge=1,
        description="longest time for a proposal, in milliseconds; after that the target generates alone for a while",
    )
    ngram_corpus: Path | None = Field(
        None, description="text file whose n-grams are counted at start-up; default: none"
    )
    ngram_documents: Literal["file", "line"] = Field(
        "file", description="whether --ngram-corpus is one text, or each of its lines; no n-gram crosses two texts"
    )
    ngram_order: int = Field(4, ge=1, le=8, description="tokens of the longest n-grams")
    ngram_entries: int = Field(
        1 << 20, ge=1, description="maximum n-grams to keep of the corpus, and as many again of requests"
    )
    ngram_learn: bool = Field(
        False,
        description="also count prompts and texts of requests; proposals then reveal parts of them to other clients",
    )
    lookup_min_match: int = Field(
        2, ge=1, le=64, description="shortest match, in tokens, after which the drafter lookup copies"
    )
    outcome_cache: bool = Field(
        True,
        description="with the drafter model: draft the likely continuations while the target verifies, as long as this "
        "measurably gains",
    )
    speculation: Literal["fixed", "heuristic", "adaptive"] = Field(
        "adaptive",
        description="policy that chooses gamma, the tokens in each proposal, for requests that name none; fixed: "
        "--gamma; heuristic: 2 more after a fully accepted proposal, else 1 less; adaptive: by "
        "measurement, for the most tokens a second",
    )
    gamma: int = Field(
        5,
        ge=0,
        le=256,
        description="tokens in each proposal with the policy fixed, and in the first proposal with the others; at "
        "most --max-gamma",
    )
    max_entropy: float | None = Field(
        None,
        ge=0,
        description="end a proposal where the draft's next token has more entropy than this, in nats; default: no "
        "bound",
    )
    max_gamma: int = Field(
        16, ge=1, le=256, description="maximum tokens in a proposal; the verifier's limit also holds"
    )
    keep_mass: float = Field(0.99, gt=0, le=1, description="probability that a truncated draft distribution keeps")
    max_support: int = Field(
        256, ge=1, le=256, description="maximum tokens in a truncated distribution; the verifier's limit also holds"
    )
    prefill_tokens: int = Field(512, ge=1, description="maximum prompt tokens in a batch; longer prompts take several")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="maximum tokens in a prompt; default: as many as a sequence holds"
    )
    max_samples: int = Field(16, ge=1, description="maximum samples (n) of a request")
    max_stop_strings: int = Field(16, ge=0, description="maximum stop strings of a request")
    max_stop_string_chars: int = Field(256, ge=1, description="longest stop string, in characters")
    verifier_timeout: float = Field(
        30.0,
        gt=0,
        description="a sequence moves to another verifier if the one that owes it an answer sends nothing for so many "
        "seconds; more than 5, since waiting sequences get a notice every 5 s",
    )
    failover_timeout: float = Field(
        30.0, ge=0, description="seconds that a sequence waits for another verifier after a loss"
    )
    max_waiting: int = Field(256, ge=0, description="maximum sequences in the queue; more are refused")
    request_timeout: float = Field(600.0, gt=0, description="longest time for a request without a deadline, in seconds")
    idle_timeout: float = Field(60.0, gt=0, description="seconds without a message after which a Propose stream ends")
    vllm_grpc: bool = Field(
        False,
        description="also serve vLLM's gRPC contract, vllm.grpc.engine.VllmEngine, at --listen; needs the package "
        "smg-grpc-proto (extra vllm)",
    )
    slow_client_timeout: float = Field(
        30.0, gt=0, description="seconds that one write waits for the client to read before its call ends"
    )
    contended_idle_timeout: float = Field(
        5.0,
        gt=0,
        description="seconds of --idle-timeout and --slow-client-timeout while others wait in the queue, if that is "
        "shorter",
    )

    @property
    def layers_to_skip(self) -> str | None:
        return self.skip_layers
