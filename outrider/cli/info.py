"""`outrider info`: model, limits, health and load of a service."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click
import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from rich.console import Console

from outrider.cli.options import Address, calling_options, timeout_option, tls_of
from outrider.cli.output import Failure, table, write_json
from outrider.client import TLS, AcceptanceRule, Drafter
from outrider.client.endpoints import Endpoints
from outrider.client.errors import explained
from outrider.rpc.channel import check_plaintext
from outrider.rpc.errors import from_rpc_error
from outrider.rpc.health import PROBES
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2, sampling_pb2, verifier_service_pb2

_PROBE = "outrider-info"
_HASH_OF_TOKEN_0 = hashlib.blake2b(bytes(4), digest_size=8).digest()


@click.command("info", short_help="Model, limits, health and load of a service.")
@click.argument("address", type=Address(), metavar="HOST:PORT")
@timeout_option("Time after which the command fails.", default=10.0)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@calling_options
def info_command(
    address: str, timeout: float, as_json: bool, token_file: str | None, plaintext: bool, **tls: Any
) -> None:
    """Show model, limits, health and load of the service at HOST:PORT, a draft service or a verifier.

    To learn a verifier's load the command has it generate one token. If that is refused, or takes more than half of
    --timeout, the load is unknown. A draft service reports its load in its metrics only (--metrics-listen).
    """
    security = tls_of(tls)
    try:
        if security is None and not plaintext:
            check_plaintext(address, "give --tls-ca or --tls, or --plaintext")
        found = asyncio.run(_look(address, security, token_file, timeout))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except TimeoutError:
        raise Failure(
            f"DEADLINE_EXCEEDED: {address} did not answer within {timeout:g} s; raise --timeout, or check the address"
        ) from None
    except grpc.RpcError as error:
        raise asyncio.run(explained(error, address, timeout, uses_tls=security is not None)) from error
    if as_json:
        write_json(found)
    else:
        _draw(Console(highlight=False), found)


async def _look(address: str, tls: TLS | None, token_file: str | None, timeout: float) -> dict[str, Any]:
    endpoints = Endpoints([address], tls, token_file)

    def begin(service: str, method: str, request: Any = None) -> Any:
        return endpoints.begin(address, method, request, None, service=service)

    found: dict[str, Any] = {"address": address}
    try:
        async with asyncio.timeout(timeout):
            try:
                both = await begin("draft", "GetModel", draft_service_pb2.DraftServiceGetModelRequest())
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                own_request = verifier_service_pb2.VerifierServiceGetModelRequest()
                model = (await begin("verifier", "GetModel", own_request)).model
                found |= {"service": "verifier", "model": _model(model)}
                found["health"] = await _health(begin)
                try:
                    async with asyncio.timeout(timeout / 2):
                        found["load"] = await _load(begin("verifier", "Verify"), model)
                except TimeoutError:
                    found |= {"load": None, "load_error": f"no token within {timeout / 2:g} s"}
                except grpc.RpcError as error:
                    found |= {"load": None, "load_error": from_rpc_error(error).message}
            else:
                found |= {"service": "draft service", "model": _model(both.model), "target": _model(both.target)}
                found["drafters"] = [Drafter.of(number).value for number in both.drafters]
                found["default_drafter"] = Drafter.of(both.default_drafter).value
                found["health"] = await _health(begin)
    finally:
        await endpoints.close()
    return found


def _model(model: model_pb2.ModelInfo) -> dict[str, Any]:
    shown = json_format.MessageToDict(model, preserving_proto_field_name=True)
    for field in ("rules", "lossy_rules"):
        shown[field] = [AcceptanceRule.of(number).value for number in getattr(model, field)]
    shown["default_rule"] = AcceptanceRule.of(model.default_rule).value
    return shown


async def _health(begin: Callable[..., Any]) -> dict[str, str]:
    statuses = {}
    for probe in PROBES:
        answer = await begin("health", "Check", health_pb2.HealthCheckRequest(service=probe))
        statuses[probe] = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return statuses


async def _load(call: Any, model: model_pb2.ModelInfo) -> dict[str, Any]:
    """Has the verifier generate one token, by a call of `Verify`. Returns the load before that step, and the time."""
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=[0],
        max_new_tokens=1,
        ignore_eos=True,
        request_id=_PROBE,
        decode=verifier_service_pb2.Decode(round=1, base_length=1, prefix_hash=_HASH_OF_TOKEN_0, num_tokens=1),
        sampling=sampling_pb2.SamplingParams(seed=0, rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE),
    )
    # The least input: one token, or one sample of silence.
    if model.encoder.kind == model_pb2.ENCODER_KIND_TEXT:
        opening.encoder_input.token_ids.ids.append(0)
    elif model.encoder.kind == model_pb2.ENCODER_KIND_SPEECH:
        silence = input_pb2.Audio(
            samples=bytes(2), format=input_pb2.AUDIO_FORMAT_S16LE, sample_rate=model.encoder.sample_rate
        )
        opening.encoder_input.audio.CopyFrom(silence)
    began = time.perf_counter()
    with suppress(asyncio.InvalidStateError):  # it was refused before: reading tells why
        await call.write(verifier_service_pb2.VerifyRequest(sequence_id=_PROBE, open=opening))
    async for answer in call:
        if answer.WhichOneof("kind") == "verdict":
            call.cancel()
            load = answer.verdict.load
            return {
                "running": max(0, load.running - 1),  # without this sequence, if the last step counted it
                "waiting": load.waiting,
                "kv_usage": load.kv_usage,
                "pass_fixed_us": load.pass_fixed_us,
                "pass_token_us": load.pass_token_us,
                "one_token_ms": (time.perf_counter() - began) * 1e3,
            }
    raise Failure("the verifier ended the stream without a verdict; see its log")


# ----------------------------------------------------------------------------------------------------------- drawing


_SHOWN_CHARACTERS = 12  # of a fingerprint
# Fields that the table leaves out; --json has them.
_LEFT_OUT = ("limits", "logits_size", "lossy_rules", "noise_version", "protocol_version")


def _draw(out: Console, found: dict[str, Any]) -> None:
    health = found["health"]
    state = "ready" if health["readiness"] == "SERVING" else "not ready"
    if health["liveness"] != "SERVING":
        state += ", not alive"
    out.print(f"{found['service']} at {found['address']}: {state}", soft_wrap=True)
    rows = table("", no_wrap=False)
    rows.columns[0].overflow = "fold"
    models = {name: found[name] for name in ("model", "target") if name in found}
    for name in models:
        rows.add_column("draft" if "target" in found and name == "model" else "target", overflow="fold")
    for field in dict.fromkeys(field for model in models.values() for field in model if field not in _LEFT_OUT):
        length = _SHOWN_CHARACTERS if field.endswith("_fingerprint") else None
        rows.add_row(field, *(_text(model.get(field, "–"))[:length] for model in models.values()))
    for field in dict.fromkeys(field for model in models.values() for field in model.get("limits", ())):
        rows.add_row(field, *(_text(model.get("limits", {}).get(field, "–")) for model in models.values()))
    out.print(rows)
    if "drafters" in found:
        out.print(f"drafters: {', '.join(found['drafters'])}; default {found['default_drafter']}", soft_wrap=True)
    if "load_error" in found:
        out.print(f"load: unknown: {found['load_error']}", soft_wrap=True, markup=False)
    elif "load" in found:
        load = found["load"]
        out.print(
            f"load: {load['running']} sequences running, {load['waiting']} waiting, {load['kv_usage']:.0%} of the KV "
            f"cache in use; one token took {load['one_token_ms']:.0f} ms",
            soft_wrap=True,
        )
    else:
        names = "outrider_num_requests_running and outrider_num_requests_queued"  # the contract has no load of it
        out.print(f"load: see {names} in its metrics (--metrics-listen)", soft_wrap=True)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return str(value)
