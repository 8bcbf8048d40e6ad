"""Options that commands share, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import click

from outrider.client import TLS, AcceptanceRule, Client, Drafter, Options, SpeculationPolicy
from outrider.rpc.channel import SOCKET

Command = TypeVar("Command", bound=Callable[..., Any])

_RULES = [rule.value for rule in AcceptanceRule if rule is not AcceptanceRule.UNSPECIFIED]
POLICIES = [policy.value for policy in SpeculationPolicy if policy is not SpeculationPolicy.UNSPECIFIED]
DRAFTERS = [drafter.value for drafter in Drafter if drafter is not Drafter.UNSPECIFIED]


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


def address_option(name: str, default: str, text: str) -> Callable[[Command], Command]:
    """An option that takes `HOST:PORT`."""
    return click.option(name, metavar="HOST:PORT", default=default, show_default=True, callback=_address, help=text)


def addresses_option(name: str, default: str, text: str) -> Callable[[Command], Command]:
    """An option that takes `HOST:PORT`, or several with commas between."""
    metavar = "HOST:PORT[,...]"
    return click.option(name, metavar=metavar, default=default, show_default=True, callback=_addresses, help=text)


def _addresses(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return ",".join(_address(ctx, param, part.strip()) for part in value.split(","))


def _address(ctx: click.Context, param: click.Parameter, value: str) -> str:
    host, colon, port = value.rpartition(":")
    if value.startswith(f"{SOCKET}/"):
        return value
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT, for example 127.0.0.1:50051", ctx, param)
    return value


class DeviceName(click.ParamType[str]):
    """`auto`, `cpu`, `cuda` or `cuda:N`. Whether it is there the service says, which has torch."""

    name = "DEVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, _, number = str(value).partition(":")
        if value in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdecimal()):
            return str(value)
        self.fail(f"{value!r} is not auto, cpu, cuda or cuda:N", param, ctx)


_DEVICES = (
    click.option("--device", type=DeviceName(), help="Device of both models: cpu, cuda, cuda:1. Default: auto."),
    click.option("--target-device", type=DeviceName(), help="Device of the target. Default: --device."),
    click.option("--draft-device", type=DeviceName(), help="Device of the draft. Default: --device."),
)

_LAW = (
    click.option("--top-k", type=int, help="Keep the K most probable tokens. Default: all."),
    click.option("--top-p", type=float, help="Keep the most probable tokens up to this mass, in (0, 1]. Default: 1."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the most probable one. Default: 0."),
    click.option(
        "--seed", type=int, help="The same seed is the same text (rule coupled). Default: chosen, and reported."
    ),
    click.option(
        "--rule",
        type=click.Choice(_RULES),
        help="How proposals are judged; sigmoid is lossy. Default: coupled with --seed, else the service's.",
    ),
    click.option(
        "--cache-salt",
        metavar="TEXT",
        help="What is cached of earlier prompts is used under the same salt.",
    ),
    click.option(
        "--sigmoid-scales", metavar="ALPHA BETA", type=float, nargs=2, help="With --rule sigmoid, which needs them."
    ),
    click.option("--gamma", type=int, help="Tokens per proposal; 0: the target alone. Default: the service chooses."),
    click.option(
        "--speculation",
        type=click.Choice(POLICIES),
        help="What chooses them, --gamma being the most. Default: fixed with --gamma, else the service's.",
    ),
    click.option(
        "--max-entropy", metavar="NATS", type=float, help="A proposal ends where the draft is less sure than this."
    ),
    click.option(
        "--drafter",
        type=click.Choice(DRAFTERS),
        help="What proposes, of what the service has. Default: the service chooses.",
    ),
    click.option("--draft-temperature", type=float, help="Temperature of what is proposed. Default: --temperature."),
    click.option(
        "--outcome-cache/--no-outcome-cache",
        default=None,
        help="Draft for likely verdicts while one is under way. Default: the service chooses.",
    ),
)

_REST = (
    click.option("--repetition-penalty", type=float, help="Weakens tokens of prompt and output. Default: 1."),
    click.option("--presence-penalty", type=float, help="Subtracted from logits of tokens in the output."),
    click.option("--frequency-penalty", type=float, help="The same, times how often they occur."),
    click.option("--logit-bias", type=TokenBias(), multiple=True, help="Added to one token's logit. Repeatable."),
    click.option(
        "--ban", "banned_token_ids", metavar="ID", type=int, multiple=True, help="Never write this token. Repeatable."
    ),
    click.option("--lenience", type=float, help="Below 1 accepts more, and is lossy. Default: 1."),
    click.option("--min-new-tokens", type=int, help="Nothing ends the text before this many."),
    click.option("--stop", metavar="TEXT", multiple=True, help="Ends the text, and is not part of it. Repeatable."),
    click.option(
        "--stop-token-id", "stop_token_ids", metavar="ID", type=int, multiple=True, help="Ends the text. Repeatable."
    ),
    click.option("--ignore-eos", is_flag=True, help="Do not end at the model's own end of text."),
    click.option("--n", type=int, help="Independent samples. Default: 1."),
    click.option(
        "--logprobs",
        metavar="N",
        type=int,
        help="With --json: log-probabilities of each token, and of the N most probable.",
    ),
    click.option("--time-limit", metavar="SECONDS", type=float, help="The text ends here, wherever it is."),
    click.option("--keep-special-tokens", is_flag=True, help="Leave special tokens in the text."),
    click.option("--frame-bytes", metavar="BYTES", type=int, help="Every response has this size on the wire."),
    click.option("--frame-pace", metavar="SECONDS", type=float, help="Responses leave this far apart."),
    click.option("--fixed-size-rounds", is_flag=True, help="The services' messages about rounds have one size."),
    click.option("--request-id", metavar="NAME", help="Names the request in the services' logs."),
)


def device_options(command: Command) -> Command:
    """`--device`, and one of its own for each model of a pair."""
    return _apply(_DEVICES, command)


def temperature_option(default: str) -> Callable[[Command], Command]:
    """`--temperature`; `default` is what the command or the service takes where it is not given."""
    text = f"Divides the logits; 0 takes the most probable token. Default: {default}."
    return click.option("--temperature", type=float, help=text)


def law_options(command: Command) -> Command:
    """The options that say how text is sampled and speculated on, `temperature_option` aside."""
    return _apply(_LAW, command)


def request_options(command: Command) -> Command:
    """All options of one request, those of `law_options` among them."""
    return _apply((*_LAW, *_REST), command)


def _apply(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def request_of(values: dict[str, Any]) -> Options:
    """The client's options that these values of the command line come to; what was not given is left out."""
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return cast("Options", given)


_FILE = click.Path(exists=True, dir_okay=False)

_CALLING = (
    click.option("--tls", is_flag=True, help="Speak TLS; the CAs that come with gRPC vouch for the service."),
    click.option("--tls-ca", metavar="FILE", type=_FILE, help="Speak TLS; this CA vouches for the service."),
    click.option("--tls-cert", metavar="FILE", type=_FILE, help="Certificate to show to a service that asks for one."),
    click.option("--tls-key", metavar="FILE", type=_FILE, help="Its private key."),
    click.option("--tls-name", metavar="NAME", help="Name in the service's certificate. Default: that of --draft."),
    click.option("--token-file", metavar="FILE", type=_FILE, help="Bearer token that goes with the request."),
    click.option("--plaintext", is_flag=True, help="Speak plaintext to another machine, where the network is trusted."),
)

_SERVING = (
    click.option("--tls-cert", metavar="FILE", type=_FILE, help="Certificate of the draft service: it speaks TLS."),
    click.option("--tls-key", metavar="FILE", type=_FILE, help="Its private key."),
    click.option("--tls-client-ca", metavar="FILE", type=_FILE, help="Clients must show a certificate of this CA."),
    click.option("--allow-client-san", metavar="NAME", multiple=True, help="And it must have this name. Repeatable."),
    click.option("--auth-token-file", metavar="FILE", type=_FILE, help="Clients must send one of these bearer tokens."),
    click.option("--plaintext", is_flag=True, help="Listen in plaintext for other machines too."),
)


def calling_options(command: Command) -> Command:
    """The options of a command that calls a draft service; see `security_of`."""
    return _apply(_CALLING, command)


def serving_options(command: Command) -> Command:
    """The options of a command that starts services; see `flags_of`."""
    return _apply(_SERVING, command)


def security_of(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the values of `calling_options` out of `values`, and returns the arguments of `Client` they come to.

    Raises:
        UsageError: they contradict each other.
    """
    wanted, ca, cert, key, name, token, plaintext = (
        values.pop(each) for each in ("tls", "tls_ca", "tls_cert", "tls_key", "tls_name", "token_file", "plaintext")
    )
    tls = TLS(ca, cert, key, name) if wanted or ca else None
    if tls is None and (cert or key or name):
        raise click.UsageError("--tls-cert, --tls-key and --tls-name need --tls-ca or --tls")
    return {"tls": tls, "token_file": token, "plaintext": plaintext}


def connected(addresses: str, timeout: float, security: dict[str, Any], *, patience: float | None = None) -> Client:
    """The client for these addresses.

    Raises:
        UsageError: they are not loopback, and nothing says that plaintext is meant; or a file is not what it should be.
    """
    try:
        return Client(addresses, timeout=timeout, patience=patience, **security)
    except ValueError as error:
        text = str(error).replace("tls=TLS(...)", "--tls-ca or --tls").replace("plaintext=True", "--plaintext")
        raise click.UsageError(text) from error


def flags_of(values: dict[str, Any]) -> tuple[str, ...]:
    """The flags of the draft service that the values of `serving_options` come to."""
    flags: list[str] = ["--plaintext"] if values["plaintext"] else []
    for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"):
        if values[name] is not None:
            flags += [f"--{name.replace('_', '-')}", values[name]]
    for san in values["allow_client_san"]:
        flags += ["--allow-client-san", san]
    return tuple(flags)
