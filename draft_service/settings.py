"""Settings of the draft service, beside those that both services share."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from outrider.service.settings import ServiceAddress, ServiceSettings, split_commas

Addresses = Annotated[tuple[ServiceAddress, ...], NoDecode, BeforeValidator(split_commas), Field(min_length=1)]


class DraftSettings(ServiceSettings):
    """The draft service: writes text with a draft model here and a target model at a verifier, over gRPC."""

    model_config = SettingsConfigDict(cli_prog_name="python -m draft_service")

    listen: ServiceAddress = Field(
        "127.0.0.1:50051", description="HOST:PORT or unix:PATH to listen at; port 0 takes a free one"
    )
    verifier: Addresses = Field(
        ("127.0.0.1:50052",),
        description="HOST:PORT or unix:PATH of the verifier service; several, with commas or by several flags, are "
        "replicas, and a DNS name stands for all its addresses",
    )
    verifier_tls_ca: Path | None = Field(
        None,
        description="PEM file of the CA that vouches for verifiers; read anew on change, as the next two; default: "
        "plaintext",
    )
    verifier_tls_cert: Path | None = Field(
        None, description="PEM file of the certificate to show to verifiers that ask for one"
    )
    verifier_tls_key: Path | None = Field(None, description="PEM file of its private key, without a passphrase")
    verifier_tls_name: str | None = Field(
        None, description="name that verifiers' certificates must have; default: the host that --verifier names"
    )
    verifier_resolve_interval: float = Field(
        10.0, gt=0, description="seconds after which DNS names of verifiers are resolved anew; also when one is lost"
    )
    drafter: Literal["model", "staged", "ngram", "lookup", "random", "none"] = Field(
        "model",
        description="what proposes where a request does not say; all but `model` and `staged` load no weights, and of "
        "--model the tokenizer alone",
    )
    staged_by: Literal["lookup", "ngram"] = Field("lookup", description="what guesses for the draft model in `staged`")
    staged_guesses: int = Field(
        8, ge=1, le=256, description="tokens that `staged` guesses at once at most; never all that are left to draft"
    )
    draft_temperature: float | None = Field(
        None, ge=0, le=100, description="temperature by which all draft that have one; default: the request's own"
    )
    draft_timeout: int = Field(
        10_000, ge=1, description="milliseconds a proposal may take; the target writes alone in the place of a late one"
    )
    ngram_corpus: Path | None = Field(
        None, description="text file that the drafter `ngram` counts at the start; default: none"
    )
    ngram_documents: Literal["file", "line"] = Field(
        "file", description="what is a document of --ngram-corpus: the file, or each line"
    )
    ngram_order: int = Field(4, ge=1, le=8, description="n of `ngram`: 1 counts single tokens, 2 pairs, and so on")
    ngram_entries: int = Field(
        1 << 20, ge=1, description="n-grams that `ngram` remembers of the corpus, and as many of the served texts"
    )
    ngram_learn: bool = Field(
        False, description="`ngram` also counts what the service writes; its proposals show that to other requests"
    )
    lookup_min_match: int = Field(
        2, ge=1, le=64, description="tokens that must have occurred before for `lookup` to copy what followed"
    )
    outcome_cache: bool = Field(
        True, description="`model` drafts for the likely verdicts while the verdict is under way, where that pays"
    )
    speculation: Literal["fixed", "heuristic", "adaptive"] = Field(
        "adaptive",
        description="how long a proposal is where a request does not say: --gamma tokens; 2 more after one that was "
        "accepted whole and else 1 less; or what gives the most text a second by what was measured",
    )
    gamma: int = Field(
        5,
        ge=0,
        le=256,
        description="tokens of a proposal where a request does not say, or of the first one; at most max-gamma",
    )
    max_entropy: float | None = Field(
        None, ge=0, description="nats: a proposal ends before the token whose draft law has more; default: no bound"
    )
    max_gamma: int = Field(16, ge=1, le=256, description="tokens of a proposal at most; the verifier may set less")
    keep_mass: float = Field(0.99, gt=0, le=1, description="mass of the draft's law that is kept to sample from")
    max_support: int = Field(256, ge=1, le=256, description="tokens of that law at most; the verifier may set less")
    prefill_tokens: int = Field(512, ge=1, description="prompt tokens of one pass at most; longer prompts take several")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="tokens of a prompt at most; default: as many as a sequence may have"
    )
    max_samples: int = Field(16, ge=1, description="samples (n) of one request at most")
    max_stop_strings: int = Field(16, ge=0, description="stop strings of one request at most")
    max_stop_string_chars: int = Field(256, ge=1, description="characters of one stop string at most")
    verifier_timeout: float = Field(
        30.0,
        gt=0,
        description="seconds a verifier may be silent while it owes an answer; where one waits, it says so every 5",
    )
    failover_patience: float = Field(
        30.0, ge=0, description="seconds a sequence that has lost its verifier may wait for another one"
    )
    max_waiting: int = Field(
        256,
        ge=0,
        description="sequences that may wait in the queue while --max-sequences run, each until its deadline; more are "
        "refused",
    )
    request_timeout: float = Field(600.0, gt=0, description="seconds of a request whose client sets no deadline")
    idle_timeout: float = Field(60.0, gt=0, description="seconds after which a silent Propose stream is closed")
    slow_client_timeout: float = Field(30.0, gt=0, description="seconds a client may leave 64 responses unread")
    contended_idle_timeout: float = Field(
        5.0, gt=0, description="seconds instead of the two before, where less, while others wait in the queue"
    )
