"""Settings that both services share: flags first, then `OUTRIDER_…` in the environment, then defaults; and what those
of security come to: how a service listens, who may call it, and how it calls others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import structlog
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from outrider.rpc import channel
from outrider.rpc.auth import AllowedClients, Authentication, ClientLimits, Tokens
from outrider.rpc.channel import SOCKET, is_local
from outrider.rpc.tls import FileProblem, ServerTLS

_log = structlog.get_logger()


def split_commas(value: Any) -> Any:
    """Texts with commas as the list they stand for, each entry once."""
    texts = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]


class SecuritySettings(BaseSettings):
    """Transport security and limits of a listener."""

    tls_cert: Path | None = Field(
        None,
        description="PEM file of the server's certificate, and of those between it and its CA; read anew on change",
    )
    tls_key: Path | None = Field(None, description="PEM file of its private key, without a passphrase")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the CA that clients must show a certificate of; default: clients need none"
    )
    allow_client_san: Names = Field(
        (),
        description="DNS name or URI that a client's certificate must have as a subjectAltName, letter for letter; "
        "several, with commas or by several flags: one of them",
    )
    auth_token_file: Path | None = Field(
        None, description="file of bearer tokens, one a line, of which every call must bear one; read anew on change"
    )
    plaintext: bool = Field(
        False, description="speak plaintext at addresses that are not loopback too, where nothing says TLS"
    )
    max_concurrent_streams: int = Field(
        1024, ge=1, description="calls in progress on one connection at most; more wait at the client"
    )
    max_client_sequences: int | None = Field(
        None,
        ge=1,
        description="sequences in progress of one client at most (each sample of a call is one); more are refused; "
        "default: any",
    )
    client_rate: float | None = Field(
        None, gt=0, description="sequences a second of one client in the long run; more are refused; default: any"
    )
    client_burst: int | None = Field(
        None,
        ge=1,
        description="sequences of one client that may come at once after a pause; default: those of one second",
    )
    max_connection_age: float | None = Field(
        None,
        gt=0,
        description="seconds after which a connection takes no new calls, so that clients resolve names and show "
        "certificates again; calls in progress go on; default: however old",
    )


def _host_and_port(value: str) -> str:
    host, separator, port = value.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT with a port of 0 to 65535")
    return value


Address = Annotated[str, AfterValidator(_host_and_port)]


def _host_and_port_or_socket(value: str) -> str:
    return value if value.startswith(f"{SOCKET}/") else _host_and_port(value)


ServiceAddress = Annotated[str, AfterValidator(_host_and_port_or_socket)]
"""Where a service of ours listens: `HOST:PORT`, or `unix:PATH`."""


def _endpoint(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise ValueError(f"{value!r} is not http://HOST:PORT or https://HOST:PORT")
    _host_and_port(rest.rstrip("/"))
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class SettingsError(Exception):
    """A setting that this machine cannot meet; the text is one line that names the flag."""


class ServiceSettings(SecuritySettings):
    """The settings of either service.

    Attributes:
        names_clients: whether the certificate of a client is not enough, and its name has to be one of those allowed.
    """

    names_clients: ClassVar[bool] = False

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_prog_name="outrider",
        extra="ignore",
    )

    model: str = Field(description="folder or hub id of the model")
    revision: str | None = Field(None, description="branch, tag or commit, for a hub id")
    trust_remote_code: bool = Field(False, description="run model code that comes with the checkpoint")
    device: str = Field("auto", description="auto, cpu, cuda (the first GPU) or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format of the weights; auto: the checkpoint's own where the device is fast at it",
    )
    attention: Literal["auto", "triton", "eager", "sdpa"] = Field(
        "auto",
        description="what attends to keys and values; auto: triton (our kernel) on a GPU, or eager (spelled out, slow) "
        "where the kernel cannot; sdpa on a CPU, each sequence in one piece of memory",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the model; default: torch's own choice")
    max_sequences: int = Field(64, ge=1, description="sequences in progress at once; more wait")
    max_sequence_tokens: int | None = Field(
        None, ge=2, description="prompt and output of one sequence together; default: the context, at most 8192"
    )
    kv_cache_mb: int | None = Field(
        None,
        ge=1,
        description="MiB of keys and values of all sequences; default: on a GPU by --kv-memory-fraction, on a CPU 1024",
    )
    kv_memory_fraction: float = Field(
        0.85,
        gt=0,
        le=1,
        description="share that keys and values take of what weights, graphs and the largest pass leave of a GPU's "
        "memory",
    )
    graphs: bool = Field(
        True, description="on a GPU: capture passes of the sizes that come often as CUDA graphs, at the start"
    )
    graph_seconds: float = Field(
        120.0, gt=0, description="how long capturing them may take; where it will not do, the largest are left out"
    )
    graph_memory_mb: int = Field(
        2048, ge=1, description="MiB that they may hold; set aside before keys and values get their share"
    )
    listen: ServiceAddress = Field(
        "127.0.0.1:0", description="HOST:PORT or unix:PATH to listen at; port 0 takes a free one"
    )
    health_listen: Address | None = Field(
        None,
        description="HOST:PORT of the health service alone, in plaintext, for probes that have no certificate; port 0 "
        "takes a free one; default: health is at --listen alone",
    )
    max_message_bytes: int | None = Field(
        None,
        ge=1 << 16,
        description="largest message taken; default: what the largest one comes to by the model's vocabulary and these "
        "settings, and at least 4 MiB",
    )
    grace: float = Field(
        30.0,
        ge=0,
        description="seconds from SIGTERM to the exit; running requests have all but the last tenth of it, or the last "
        "2 s where that is less, to finish or to go on elsewhere",
    )
    liveness_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds that a step of the engine may last before the health service's `liveness` is NOT_SERVING; "
        "never less than four times the longest so far",
    )
    metrics_listen: Address | None = Field(
        None, description="HOST:PORT of Prometheus metrics over HTTP; port 0 takes a free one; default: none"
    )
    otlp_endpoint: Endpoint | None = Field(
        None,
        description="http:// or https:// HOST:PORT of a collector that takes traces by OTLP over gRPC; default: none",
    )
    trace_sample: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the calls that are traced, of those that come without a trace; of others theirs decides",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line written")

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None, *, program: str) -> Any:
        """Reads flags and environment; prints what is wrong, by field, and exits with 2 where something is.

        Args:
            arguments: the flags; None takes those of the process.
            program: how the help names the program.
        """
        import sys

        from pydantic import ValidationError
        from pydantic_settings import CliApp

        try:
            return CliApp.run(cls, cli_args=sys.argv[1:] if arguments is None else arguments)
        except ValidationError as error:
            for problem in error.errors():
                field = "--" + "-".join(str(part) for part in problem["loc"]).replace("_", "-")
                print(f"{program}: {field}: {problem['msg']}", file=sys.stderr)  # noqa: T201
            raise SystemExit(2) from None


# ---------------------------------------------------------------------------------------------------------- security

Made = TypeVar("Made")


@dataclass(frozen=True)
class Listening:
    """How a service listens.

    Attributes:
        tls: None is plaintext.
        first: interceptors that every call meets first.
    """

    tls: ServerTLS | None
    first: list[Authentication]

    @property
    def transport(self) -> str:
        """For the log."""
        return "plaintext" if self.tls is None else "mutual TLS" if self.tls.asks_clients else "TLS"


def listening(settings: ServiceSettings) -> Listening:
    """How these settings have a service listen.

    Raises:
        SettingsError: they contradict each other, a file is not what it should be, or plaintext would leave this
            machine without having been asked for.
    """
    tls = _server_tls(settings)
    if settings.allow_client_san and settings.tls_client_ca is None:
        raise SettingsError("--allow-client-san needs --tls-client-ca: without it nobody vouches for a client's names")
    if settings.tls_client_ca is not None and settings.names_clients and not settings.allow_client_san:
        raise SettingsError(
            "--tls-client-ca needs --allow-client-san here: a verifier admits the clients that are named, and not all "
            "that have a certificate of the CA"
        )
    if tls is None:
        check_plaintext("--listen", settings.listen, settings.plaintext, "give --tls-cert and --tls-key")
    tokens = None
    if (path := settings.auth_token_file) is not None:
        tokens = from_files("--auth-token-file", lambda: Tokens(path))
        if tls is None and not is_local(settings.listen):
            _log.warning("tokens travel in plaintext, where whoever watches can take them", listen=settings.listen)
    allowed = AllowedClients(settings.allow_client_san) if settings.allow_client_san else None
    limits = _limits(settings)
    asks = any(each is not None for each in (allowed, tokens, limits))
    return Listening(tls, [Authentication(allowed=allowed, tokens=tokens, limits=limits)] if asks else [])


def check_plaintext(flag: str, address: str, asked_for: bool, instead: str) -> None:
    """Checks that plaintext stays on this machine, or is meant to leave it.

    Raises:
        SettingsError: neither.
    """
    if not asked_for:
        try:
            channel.check_plaintext(address, f"{instead}, or --plaintext")
        except ValueError as error:
            raise SettingsError(f"{flag} {error}") from None


def from_files(flag: str, make: Callable[[], Made]) -> Made:
    """Returns what `make` reads from files.

    Raises:
        SettingsError: it cannot; names the flag.
    """
    try:
        return make()
    except FileProblem as problem:
        raise SettingsError(f"{flag}: {problem}") from problem


def certificate_and_key(cert_flag: str, cert: Path | None, key_flag: str, key: Path | None) -> tuple[Path, Path] | None:
    """A certificate and its key; None where neither is given.

    Raises:
        SettingsError: one alone is.
    """
    if cert is not None and key is not None:
        return cert, key
    if cert is not None or key is not None:
        given, missing = (cert_flag, key_flag) if cert is not None else (key_flag, cert_flag)
        raise SettingsError(f"{given} needs {missing}")
    return None


def _server_tls(settings: ServiceSettings) -> ServerTLS | None:
    files = certificate_and_key("--tls-cert", settings.tls_cert, "--tls-key", settings.tls_key)
    ca = settings.tls_client_ca
    if files is None:
        if ca is not None:
            raise SettingsError("--tls-client-ca needs --tls-cert and --tls-key: only a TLS server can ask for it")
        return None
    return from_files("--tls-cert, --tls-key or --tls-client-ca", lambda: ServerTLS(*files, ca))


def _limits(settings: ServiceSettings) -> ClientLimits | None:
    if settings.client_rate is None and settings.max_client_sequences is None:
        if settings.client_burst is not None:
            raise SettingsError("--client-burst needs --client-rate")
        return None
    return ClientLimits(
        rate=settings.client_rate, burst=settings.client_burst, max_sequences=settings.max_client_sequences
    )
