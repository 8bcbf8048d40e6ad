"""Options that commands share, and their conversion to requests and flags."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from outrider.client import TLS, AcceptanceRule, AsyncClient, Client, Drafter, Options, SpeculationPolicy
from outrider.environment import ENV_PREFIX
from outrider.rpc.channel import checked_address

Command = TypeVar("Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False)


class FloatRange(click.FloatRange):
    """A range without NaN, which click takes for a number in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number


POSITIVE, _FROM_0 = FloatRange(min=0, min_open=True), FloatRange(min=0)
_RULES = [rule.value for rule in AcceptanceRule if rule is not AcceptanceRule.UNSPECIFIED]
POLICIES = [policy.value for policy in SpeculationPolicy if policy is not SpeculationPolicy.UNSPECIFIED]
DRAFTERS = [drafter.value for drafter in Drafter if drafter is not Drafter.UNSPECIFIED]

# Of commands that measure: a service that is not there is an error soon; one that is full for a moment is not.
RETRY_TIMEOUT_S = 5.0


def group(*options: Any) -> Any:
    """A decorator of commands that adds these options, in this order."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


# Of commands that measure a pair on speech; see `check_speech_options`.
speech_options = group(
    click.option(
        "--audio",
        metavar="FILE_OR_FOLDER",
        type=click.Path(exists=True, path_type=Path),
        multiple=True,
        help="Speech, for a target that takes speech: a WAV, FLAC, OGG or MP3 file, or a folder of them. Longer "
        "speech than the model takes at once is cut into windows. Repeatable.",
    ),
    click.option(
        "--language", metavar="NAME", default="", show_default=False, help="Language of --audio. Default: the model's."
    ),
    click.option(
        "--task",
        metavar="NAME",
        default="",
        show_default=False,
        help="transcribe, or translate (into English). Default: transcribe.",
    ),
)
timestamps_option = click.option("--timestamps", is_flag=True, help="The target writes timestamps of --audio.")


def check_speech_options(values: Mapping[str, Any], prompts_file: Path | None) -> None:
    """Refuses speech beside prompts, and options of speech without it.

    Raises:
        UsageError: as above.
    """
    if values["audio"] and prompts_file is not None:
        raise click.UsageError("--audio and --prompts-file are given; give one of them")
    for name in ("language", "task", "timestamps"):
        if values.get(name) and not values["audio"]:
            raise click.UsageError(f"--{name} is given; give --audio too")


class TokenBias(click.ParamType[tuple[int, float]]):
    """`ID=BIAS`."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token_id, equals, bias = str(value).partition("=")
        try:
            if equals:
                return int(token_id), float(bias)
        except ValueError:
            pass
        self.fail(f"{value!r} is not ID=BIAS, for example 42=-3.5", param, ctx)


class Address(click.ParamType[str]):
    """`HOST:PORT` or `unix:PATH`; or several, separated by commas. `least_port` is 0 for listeners."""

    def __init__(self, several: bool = False, least_port: int = 1) -> None:
        self.name = "HOST:PORT[,...]" if several else "HOST:PORT"
        self._several = several
        self._least_port = least_port

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = [part.strip() for part in value.split(",")] if self._several else [value]
        try:
            return ",".join(checked_address(part, self._least_port) for part in parts)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Numbers(click.ParamType[tuple[Any, ...]]):
    """Values of the type `each`, separated by commas. Each counts once, unless places have a meaning (`in_order`)."""

    def __init__(self, each: click.ParamType[Any], *, name: str = "N[,N...]", in_order: bool = False) -> None:
        self.name = name
        self._each = each
        self._in_order = in_order

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # a default
            return value
        found = [self._each.convert(part.strip(), param, ctx) for part in value.split(",")]
        return tuple(found if self._in_order else dict.fromkeys(found))


class DeviceName(click.ParamType[str]):
    """`auto`, `cpu`, `cuda` or `cuda:N`. The service checks whether the device exists."""

    name = "DEVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, _, number = str(value).partition(":")
        if value in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdecimal()):
            return str(value)
        self.fail(f"{value!r} is not auto, cpu, cuda or cuda:N", param, ctx)


# Hides token counts from observers of the network.
framing_options = group(
    click.option(
        "--frame-bytes",
        metavar="BYTES",
        type=int,
        help="Pad each response to this size, to hide from the network how many tokens it has.",
    ),
    click.option(
        "--frame-pace",
        metavar="SECONDS",
        type=float,
        help="Time between two responses, to hide from the network when tokens come; 0.001 to 10.",
    ),
    click.option(
        "--fixed-size-rounds",
        is_flag=True,
        help="Pad the messages between the services to one size for each direction.",
    ),
)

# How to run both models; see `flags_of_pair`.
model_options = group(
    click.option("--device", type=DeviceName(), help="Device of both models: cpu, cuda, cuda:1. Default: auto."),
    click.option("--target-device", type=DeviceName(), help="Device of the target. Default: --device."),
    click.option("--draft-device", type=DeviceName(), help="Device of the draft. Default: --device."),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="CPU threads of each service. Default: half of the processors. With fewer than four, all for the target.",
    ),
)

# Sampling and speculation, without `temperature_option`; see `request_of`.
sampling_options = group(
    click.option("--top-k", type=int, help="Keep the K most probable tokens. Default: 0, all."),
    click.option(
        "--top-p",
        type=float,
        help="Keep the most probable tokens that together have this probability; above 0, at most 1. Default: 1.",
    ),
    click.option(
        "--min-p",
        type=float,
        help="Drop tokens less probable than this share of the most probable token; 0 to 1. Default: 0.",
    ),
    click.option(
        "--seed",
        type=int,
        help="Seed of the random numbers: the same seed gives the same text, by --rule coupled. Default: random.",
    ),
    click.option(
        "--rule",
        type=click.Choice(_RULES),
        help="Acceptance rule; sigmoid is lossy. Default: coupled with --seed, else the service's.",
    ),
    click.option(
        "--cache-salt",
        metavar="TEXT",
        help="Share the KV cache only with requests of the same salt. Default: with all.",
    ),
    click.option(
        "--sigmoid-scales",
        metavar="ALPHA BETA",
        type=float,
        nargs=2,
        help="Scales of --rule sigmoid, in logits, the lower one first; required with it.",
    ),
    click.option("--gamma", type=int, help="Tokens in each proposal; 0: the target alone. Default: the service's."),
    click.option(
        "--speculation",
        type=click.Choice(POLICIES),
        help="Policy that chooses gamma, up to --gamma. Default: fixed with --gamma, else the service's.",
    ),
    click.option(
        "--max-entropy",
        metavar="NATS",
        type=float,
        help="End a proposal where the draft's next token has more entropy than this. Default: the service's.",
    ),
    click.option(
        "--drafter",
        type=click.Choice(DRAFTERS),
        help="Source of proposed tokens, of those that `outrider info` lists. Default: the service's.",
    ),
    click.option(
        "--draft-temperature",
        type=float,
        help="Temperature of the draft: 0, or 0.000001 to 100. Default: the service's, normally --temperature.",
    ),
    click.option(
        "--tokens-per-pass",
        metavar="N",
        type=click.IntRange(1, 256),
        help="With the drafter parallel: tokens drafted in one pass of the draft. Default: the service's.",
    ),
    click.option(
        "--outcome-cache/--no-outcome-cache",
        default=None,
        help="Draft the likely continuations while the target verifies. Default: the service's.",
    ),
)

# All other options of a request.
request_options = group(
    sampling_options,
    click.option(
        "--repetition-penalty",
        type=float,
        help="Above 1: tokens of prompt and output become less probable; 0.01 to 100. Default: 1.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Subtracted from the logits of tokens in the output; -100 to 100. Default: 0.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="Subtracted from a token's logit for each time it is in the output; -100 to 100. Default: 0.",
    ),
    click.option(
        "--logit-bias",
        type=TokenBias(),
        multiple=True,
        help="Added to the logit of the token ID; -100 to 100. Repeatable.",
    ),
    click.option(
        "--ban",
        "banned_token_ids",
        metavar="ID",
        type=int,
        multiple=True,
        help="Token id that the text must not have. Repeatable.",
    ),
    click.option(
        "--lenience",
        type=float,
        help="Below 1, at least 0.000001: more draft tokens are accepted, and the text is lossy. Default: 1.",
    ),
    click.option(
        "--min-new-tokens",
        type=int,
        help="Stop tokens and stop strings end the text only after this many tokens. Default: 0.",
    ),
    click.option("--stop", metavar="TEXT", multiple=True, help="String that ends the text; it is cut off. Repeatable."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        metavar="ID",
        type=int,
        multiple=True,
        help="Token id that ends the text. Repeatable.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence tokens."),
    click.option("--n", type=int, help="Number of independent samples. Default: 1."),
    click.option(
        "--logprobs",
        metavar="N",
        type=int,
        help="With --json: log-probabilities of each token and of the N most probable ones; 0 to 20.",
    ),
    click.option(
        "--prompt-logprobs",
        metavar="N",
        type=int,
        help="With --json: log-probabilities of the prompt's tokens and of the N most probable; 0 to 20.",
    ),
    click.option(
        "--time-limit", metavar="SECONDS", type=float, help="End the text after this time; the text so far is printed."
    ),
    click.option(
        "--keep-special-tokens", is_flag=True, help="Keep special tokens, such as <|endoftext|>, in the text."
    ),
    framing_options,
    click.option("--request-id", metavar="NAME", help="Name of the request in the services' logs. Default: random."),
)

# How to call a draft service; see `connected`.
calling_options = group(
    click.option("--tls", is_flag=True, help="Use TLS, and trust the CAs that come with gRPC."),
    click.option("--tls-ca", metavar="FILE", type=_FILE, help="Use TLS, and trust this CA (PEM)."),
    click.option(
        "--tls-cert", metavar="FILE", type=_FILE, help="Certificate of the client (PEM), if the service requires one."
    ),
    click.option("--tls-key", metavar="FILE", type=_FILE, help="Private key of --tls-cert (PEM)."),
    click.option(
        "--tls-name", metavar="NAME", help="Name in the service's certificate. Default: the host of the address."
    ),
    click.option(
        "--token-file",
        metavar="FILE",
        type=_FILE,
        help="File with the bearer token to send, if the service requires one.",
    ),
    click.option("--plaintext", is_flag=True, help="Allow plaintext to other machines."),
)


# Security of the draft service: flags of its own.
def _security_option(flag: str, **how: Any) -> Any:
    """An option of `outrider serve` with the variable of the service, too."""
    name = flag.removeprefix("--").replace("-", "_").upper()
    return click.option(flag, envvar=[f"{ENV_PREFIX}SERVE_{name}", f"{ENV_PREFIX}{name}"], **how)


serving_options = group(
    _security_option(
        "--tls-cert", metavar="FILE", type=_FILE, help="Certificate of the draft service (PEM); turns TLS on."
    ),
    _security_option("--tls-key", metavar="FILE", type=_FILE, help="Private key of --tls-cert (PEM)."),
    _security_option(
        "--tls-client-ca", metavar="FILE", type=_FILE, help="Every client must have a certificate of this CA (PEM)."
    ),
    _security_option(
        "--allow-client-san",
        metavar="NAME",
        multiple=True,
        help="DNS name or URI, of which a client's certificate must have one. Repeatable.",
    ),
    _security_option(
        "--auth-token-file",
        metavar="FILE",
        type=_FILE,
        help="File of bearer tokens, one a line; every call must carry one.",
    ),
    click.option("--plaintext", is_flag=True, help="Allow plaintext at addresses that other machines reach."),
)


def draft_option(continued: str = "", *, several: bool = True) -> Callable[[Command], Command]:
    """`--draft` of clients; `continued` says what goes on at the next address, for the help."""
    more = f"; with several, {continued} at another one if one fails" if continued else ""
    return click.option(
        "--draft", type=Address(several), default="127.0.0.1:50051", help=f"Address of the draft service{more}."
    )


def timeout_option(text: str, *, kind: FloatRange = _FROM_0, default: float = 300.0) -> Callable[[Command], Command]:
    """`--timeout`, with this help."""
    return click.option("--timeout", metavar="SECONDS", type=kind, default=default, help=text)


def retry_timeout_option(what: str) -> Callable[[Command], Command]:
    """`--retry-timeout` of commands with `--timeout`; `what` is for the help."""
    text = f"How long to retry while no draft service accepts {what}. Default: --timeout."
    return click.option("--retry-timeout", metavar="SECONDS", type=_FROM_0, help=text)


def prompts_file_option(default: str, begin: str = "Prompts: ") -> Callable[[Command], Command]:
    """`--prompts-file`; the arguments are for the help."""
    return click.option(
        "--prompts-file",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"{begin}a JSON object a line, with the field text or messages. Default: {default}.",
    )


def temperature_option(default: str) -> Callable[[Command], Command]:
    """`--temperature`; `default` is that of the command or the service, for the help."""
    text = f"Randomness of the text: 0 takes the most probable token; else 0.000001 to 100. Default: {default}."
    return click.option("--temperature", type=float, help=text)


def request_of(values: dict[str, Any]) -> Options:
    """Converts values of the command line to options of the client, without those not given.

    Raises:
        UsageError: the rule `sigmoid` has no scales.
    """
    # Only the outcome cache can be switched off.
    given = {
        name: value
        for name, value in values.items()
        if value is not None and value != () and (value is not False or name == "outcome_cache")
    }
    for name in ("logit_bias", "template_arguments"):
        if name in given:
            given[name] = dict(given[name])
    if given.get("rule") == AcceptanceRule.SIGMOID and "sigmoid_scales" not in given:
        raise click.UsageError("--rule is sigmoid; give --sigmoid-scales ALPHA BETA too")
    return cast("Options", given)


AnyClient = TypeVar("AnyClient", Client, AsyncClient)


def connected(
    addresses: str,
    timeout: float,
    retry_timeout: float | None,
    values: dict[str, Any],
    kind: type[AnyClient] = Client,  # type: ignore[assignment]  # a default does not depend on the caller
) -> AnyClient:
    """The client for these addresses; takes the values of `calling_options` out of `values`.

    Raises:
        UsageError: they contradict each other; a file has the wrong content; or plaintext would leave this machine
            without --plaintext.
    """
    tls = tls_of({each: values.pop(each) for each in ("tls", "tls_ca", "tls_cert", "tls_key", "tls_name")})
    token_file, plaintext = values.pop("token_file"), values.pop("plaintext")
    try:
        return kind(
            addresses, timeout=timeout, retry_timeout=retry_timeout, tls=tls, token_file=token_file, plaintext=plaintext
        )
    except ValueError as error:
        text = str(error).replace("tls=TLS(...)", "--tls-ca or --tls").replace("plaintext=True", "--plaintext")
        raise click.UsageError(text) from error


def tls_of(values: Mapping[str, Any]) -> TLS | None:
    """The TLS settings of `calling_options`; None: plaintext.

    Raises:
        UsageError: they contradict each other.
    """
    ca, cert, key, name = (values[each] for each in ("tls_ca", "tls_cert", "tls_key", "tls_name"))
    if values["tls"] or ca:
        return TLS(ca, cert, key, name)
    if cert or key or name:
        raise click.UsageError(
            "--tls-cert, --tls-key and --tls-name have no effect in plaintext; give --tls-ca or --tls"
        )
    return None


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Converts values of the command line to flags of a service, without those not given."""
    flags: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif isinstance(value, tuple):
            flags += [part for each in value for part in (flag, each)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def flags_of_pair(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The flags of a verifier and of its draft service, by `--target`, `--draft` and `model_options`; all other values
    are the draft service's, but for `--plaintext`, which is of both.
    """
    rest = dict(values)
    device, dtype, threads = (rest.pop(name, None) for name in ("device", "dtype", "threads"))
    target, draft = (
        {"model": rest.pop(role), "device": rest.pop(f"{role}_device") or device, "dtype": dtype, "threads": threads}
        for role in ("target", "draft")
    )
    return flags_of(target | {"plaintext": rest.get("plaintext")}), flags_of(draft | rest)
