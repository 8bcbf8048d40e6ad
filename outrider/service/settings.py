"""Settings that both services share: flags, then `OUTRIDER_…` in the environment, then defaults. Also their checks: how
a service listens, who may call it, and how it calls others.
"""

import sys
from argparse import ArgumentParser, HelpFormatter
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import PydanticKnownError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, NoDecode, SettingsConfigDict

from outrider.environment import COMMANDS, ENV_PREFIX, installed_version, unknown_variables
from outrider.rpc import channel
from outrider.rpc.auth import Authentication, ClientLimits, Tokens
from outrider.rpc.channel import checked_address, checked_host_and_port, is_local
from outrider.rpc.server import LARGEST_OPTION
from outrider.rpc.tls import ServerTLS, certificate_and_key, from_files
from outrider.rpc.tls import SettingsError as SettingsError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_log = structlog.get_logger()


def split_commas(value: Any) -> Any:
    """Splits text at commas and drops duplicates."""
    texts = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]


class SecuritySettings(BaseSettings):
    """Transport security and limits of a listener."""

    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate and its intermediate certificates; turns TLS on"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a passphrase")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of a CA; every client must present a certificate of it; default: clients need no "
        "certificate",
    )
    allow_client_san: Names = Field(
        (),
        description="DNS names or URIs; a client's certificate must have one of them, letter by letter, as a "
        "subjectAltName; needs --tls-client-ca",
    )
    auth_token_file: Path | None = Field(
        None, description="file of bearer tokens, one a line; every call must carry one of them"
    )
    plaintext: bool = Field(False, description="allow plaintext at addresses that are not loopback")
    max_concurrent_streams: int = Field(
        1024, ge=1, description="maximum calls in progress on one connection; more wait at the client"
    )
    max_client_sequences: int | None = Field(
        None,
        ge=1,
        description="maximum sequences in progress of one client (a sample is one); more are refused; default: "
        "no limit",
    )
    client_rate: float | None = Field(
        None,
        gt=0,
        description="sequences a second that one client may start in the long run; more are refused; default: no limit",
    )
    client_burst: int | None = Field(
        None,
        ge=1,
        description="sequences that one client may start at once after a pause; needs --client-rate; default: those "
        "of one second",
    )
    max_connection_age: float | None = Field(
        None,
        gt=0,
        description="seconds after which a connection takes no new calls, so that clients connect and resolve "
        "names again; default: no limit",
    )


PortListener = Annotated[str, AfterValidator(partial(checked_host_and_port, least_port=0))]
Listener = Annotated[str, AfterValidator(partial(checked_address, least_port=0))]
ServiceAddress = Annotated[str, AfterValidator(checked_address)]


def _endpoint(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise ValueError(f"{value!r} is not a URL with a port, for example http://127.0.0.1:4317")
    checked_host_and_port(rest.rstrip("/"))
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class ServiceSettings(SecuritySettings):
    """The settings of either service.

    Attributes:
        names_clients: whether --tls-client-ca requires --allow-client-san.
    """

    names_clients: ClassVar[bool] = False

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_prog_name="outrider",
        extra="ignore",
    )

    model: str = Field(
        description="folder or hub id of the model; or a GGUF file, on the hub ORG/MODEL/FILE.gguf (extra `llama`)"
    )
    revision: str | None = Field(
        None, description="branch, tag or commit of a hub id; default: the hub's default branch"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    runtime: Literal["auto", "torch", "llama.cpp"] = Field(
        "auto", description="what runs the model; auto: llama.cpp for a GGUF file, else torch"
    )
    device: str = Field(
        "auto",
        description="device of the model: cpu, cuda (the first GPU) or cuda:N; auto: the first GPU if there is "
        "one, else the CPU",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format of weights and activations; auto: the checkpoint's if the device is fast at "
        "it, else float32",
    )
    attention: Literal["auto", "triton", "eager", "sdpa"] = Field(
        "auto",
        description="attention implementation; auto: sdpa on a CPU; triton on a GPU, or eager if triton does not "
        "support the model",
    )
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads of the model; default: chosen by torch")
    max_sequences: int = Field(64, ge=1, description="maximum sequences in progress; more wait in the queue")
    max_sequence_tokens: int | None = Field(
        None,
        ge=2,
        description="maximum tokens of a sequence, prompt and output; default: the model's context length, at most "
        "8192",
    )
    kv_cache_mb: int | None = Field(
        None,
        ge=1,
        description=(
            "size of the KV cache in MiB, and the most that the prefix cache of a GGUF file takes beside it; default: "
            "1024 on a CPU, by --kv-memory-fraction on a GPU"
        ),
    )
    kv_memory_fraction: float = Field(
        0.85,
        gt=0,
        le=1,
        description="share for the KV cache of the GPU memory that is left after weights, CUDA graphs and the largest "
        "batch",
    )
    prefix_cache: bool = Field(True, description="share the KV cache of prompts that begin alike")
    graphs: bool = Field(True, description="on a GPU: capture frequent batch sizes as CUDA graphs")
    graph_seconds: float = Field(
        120.0,
        gt=0,
        description="longest time for capturing CUDA graphs, in seconds; the largest batch sizes are left out after it",
    )
    graph_memory_mb: int = Field(2048, ge=1, description="memory reserved for CUDA graphs, in MiB")
    listen: Listener = Field("127.0.0.1:0", description="HOST:PORT or unix:PATH to listen at; port 0: a free one")
    health_listen: PortListener | None = Field(
        None,
        description="HOST:PORT of a second listener, for health only and always plaintext; port 0: a free one; "
        "default: health at --listen only",
    )
    max_message_bytes: int = Field(
        16 << 20,
        ge=1 << 16,
        description="largest message accepted, in bytes; a context of more than 3 million tokens needs more",
    )
    grace: float = Field(
        30.0,
        ge=0,
        description="seconds from SIGTERM to the exit, in which requests finish or move to another service; the last "
        "tenth (2 s at most) ends the others",
    )
    liveness_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds after which a step of the engine counts as hung and the probe `liveness` fails; at "
        "least four times the longest step so far",
    )
    metrics_listen: PortListener | None = Field(
        None, description="HOST:PORT of Prometheus metrics over plaintext HTTP; port 0: a free one; default: none"
    )
    vllm_metrics: bool = Field(
        False, description="also show metrics under vLLM's names, for routers and dashboards that read those"
    )
    otlp_endpoint: Endpoint | None = Field(
        None,
        description="http://HOST:PORT or https://HOST:PORT of a collector of traces (OTLP over gRPC); default: none",
    )
    trace_sample: float = Field(
        0.01, ge=0, le=1, description="share of calls to trace; the `traceparent` of a call overrides it"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level of log lines")

    @field_validator("*")
    @classmethod
    def _fits_an_int(cls, value: Any) -> Any:
        """Libraries in C take integers as an int, and messages have at most 32 bits for them."""
        if isinstance(value, int) and value > LARGEST_OPTION:
            raise PydanticKnownError("less_than_equal", {"le": LARGEST_OPTION})
        return value

    @property
    def layers_to_skip(self) -> str | None:
        """Layers of the model to leave out, if any; see `outrider.runtime.skip_layers`."""
        return None

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None, *, program: str) -> Any:
        """Reads flags and environment. If some are wrong, prints a line for each and exits with 2.

        Args:
            arguments: the flags; None takes those of the process.
            program: the name of the program in messages.
        """
        arguments = sys.argv[1:] if arguments is None else arguments
        try:
            return CliApp.run(cls, cli_args=arguments, cli_settings_source=_flags(cls))
        except ValidationError as error:
            for problem in error.errors():
                print(f"{program}: {_described(problem, arguments)}", file=sys.stderr)  # noqa: T201
            raise SystemExit(2) from None

    def warn_of_variables(self) -> None:
        """Logs a warning for each variable OUTRIDER_… that neither a service nor a command has."""
        of_commands = [f"{ENV_PREFIX}{command.upper()}_" for command in COMMANDS]
        for variable, nearest in unknown_variables(ignored=of_commands).items():
            hint = {"nearest": nearest} if nearest else {}
            _log.warning("unknown variable is ignored", variable=variable, **hint)


# Metavars by flag, and else by the name that pydantic-settings gives the type.
_METAVARS = {
    "--model": "DIR_OR_ID",
    "--listen": "HOST:PORT",
    "--health-listen": "HOST:PORT",
    "--metrics-listen": "HOST:PORT",
    "--otlp-endpoint": "URL",
    "--verifier": "HOST:PORT,...",
    "--allow-client-san": "NAME,...",
    "--device": "DEVICE",
    "--revision": "NAME",
    "--verifier-tls-name": "NAME",
    "--skip-layers": "LAYERS",
    "Path": "FILE",
    "int": "N",
    "float": "X",
}


class _Parser(ArgumentParser):
    """Names the nearest flag of an unknown one."""

    def error(self, message: str) -> NoReturn:
        start = "unrecognized arguments: "
        if message.startswith(start):
            unknown = message.removeprefix(start).split(" ")[0].partition("=")[0]
            near = get_close_matches(unknown, self._option_string_actions, n=1)
            message = f"there is no flag {unknown}" + (f"; did you mean {near[0]}?" if near else "")
        super().error(message)


def _flags(settings: type[ServiceSettings]) -> CliSettingsSource[ArgumentParser]:
    """The flags of these settings, with --version and descriptive metavars."""
    program = settings.model_config.get("cli_prog_name")
    parser = _Parser(
        prog=program,
        usage=f"{program} --model DIR_OR_ID [options]",
        description=settings.__doc__,
        epilog=f"Each flag is also a variable: {ENV_PREFIX}MAX_SEQUENCES for --max-sequences. Flags win.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"outrider {installed_version()}")

    def add_argument(target: Any, *names: str, **options: Any) -> Any:
        if "metavar" in options:
            metavar = next((_METAVARS[name] for name in names if name in _METAVARS), None)
            options["metavar"] = metavar or _METAVARS.get(options["metavar"], options["metavar"])
        for empty in (" (default: None)", " (default: ())"):  # the descriptions explain these defaults
            options["help"] = options["help"].removesuffix(empty)
        return target.add_argument(*names, **options)

    return CliSettingsSource(
        settings,
        root_parser=parser,
        case_sensitive=True,
        add_argument_method=add_argument,
        formatter_class=HelpFormatter,
    )


def _described(problem: "ErrorDetails", arguments: list[str]) -> str:
    """One line: the flag or the variable, its value, and the requirement."""
    field = str(problem["loc"][0])
    flag, variable = "--" + field.replace("_", "-"), ENV_PREFIX + field.upper()
    if problem["type"] == "missing":
        return f"{flag} is required, or {variable} in the environment"
    is_flag = any(argument.partition("=")[0] in (flag, f"--no-{flag[2:]}") for argument in arguments)
    source = flag if is_flag else variable
    if problem["type"] == "value_error":  # of our own, with the value
        return f"{source}: {problem['msg'].removeprefix('Value error, ')}"
    if problem["type"] == "too_short":
        return f"{source} is empty; give at least one value"
    if problem["type"] in _REQUIREMENTS:
        requirement = _REQUIREMENTS[problem["type"]].format(**problem.get("ctx", {}))
    else:  # of a type that no setting has yet
        requirement = problem["msg"].removeprefix("Input should ").partition(", unable to parse")[0]
    return f"{source} is {str(problem['input'])!r}; it must {requirement}"


# By pydantic's types of errors.
_REQUIREMENTS = {
    "greater_than": "be above {gt:g}",
    "greater_than_equal": "be at least {ge:g}",
    "less_than_equal": "be at most {le:.10g}",
    "int_parsing": "be a whole number",
    "int_from_float": "be a whole number",
    "float_parsing": "be a number",
    "bool_parsing": "be true or false",
    "literal_error": "be {expected}",
}


# ---------------------------------------------------------------------------------------------------------- security


def listening(settings: ServiceSettings) -> tuple[ServerTLS | None, list[Authentication]]:
    """How a service with these settings listens: its TLS, None for plaintext, and its first interceptors.

    Raises:
        SettingsError: the settings contradict each other, a file has the wrong content, or plaintext would leave this
            machine without --plaintext.
    """
    tls = _server_tls(settings)
    if settings.allow_client_san and settings.tls_client_ca is None:
        raise SettingsError(
            "--allow-client-san needs --tls-client-ca: without a CA the names in a certificate prove nothing"
        )
    if settings.tls_client_ca is not None and settings.names_clients and not settings.allow_client_san:
        raise SettingsError(
            "--tls-client-ca needs --allow-client-san at a verifier: the names of the draft services that it admits"
        )
    if tls is None:
        check_plaintext("--listen", settings.listen, settings.plaintext, "give --tls-cert and --tls-key")
    tokens = None
    if (path := settings.auth_token_file) is not None:
        tokens = from_files("--auth-token-file", lambda: Tokens(path))
        if tls is None and not is_local(settings.listen):
            _log.warning("bearer tokens travel in plaintext; use TLS", listen=settings.listen)
    allowed, limits = settings.allow_client_san, ClientLimits.of(settings)
    if not allowed and tokens is None and limits is None:
        return tls, []
    return tls, [Authentication(allowed=allowed, tokens=tokens, limits=limits)]


def check_plaintext(flag: str, address: str, allowed: bool, instead: str) -> None:
    """Checks that plaintext stays on this machine, or is allowed to leave it.

    Raises:
        SettingsError: neither.
    """
    if not allowed:
        try:
            channel.check_plaintext(address, f"{instead}, or --plaintext")
        except ValueError as error:
            raise SettingsError(f"{flag} {error}") from None


def _server_tls(settings: ServiceSettings) -> ServerTLS | None:
    files = certificate_and_key("--tls-cert", settings.tls_cert, "--tls-key", settings.tls_key)
    ca = settings.tls_client_ca
    if files is None:
        if ca is not None:
            raise SettingsError("--tls-client-ca needs --tls-cert and --tls-key")
        return None
    return from_files("--tls-cert, --tls-key or --tls-client-ca", lambda: ServerTLS(*files, ca))
