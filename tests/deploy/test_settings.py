"""What the manifests tell the services exists there: settings, ports, probes, labels, files."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any
from unittest import mock

import pytest

from draft_service.settings import DraftSettings
from outrider.rpc.health import PROBES
from outrider.service.settings import ServiceSettings
from tests.deploy.manifests import (
    SERVICES,
    Manifest,
    composed,
    container,
    environment,
    folders,
    of_kind,
    pod,
    rendered,
    selects,
    workload,
)
from tests.deploy.torchrun import ranks_of_a_pod
from verifier_service.settings import VerifierSettings

SETTINGS: Mapping[str, type[ServiceSettings]] = {"draft": DraftSettings, "verifier": VerifierSettings}
PREFIX = "OUTRIDER_"

SECURITY = ("mtls", "plaintext")

# With TLS, as `what` of `_objects`.
SECURED = [f"component mtls+{name}" for name in folders("components") if name not in SECURITY]

EVERYTHING = [
    *(f"overlay {name}" for name in folders("overlays")),
    *(f"component {name}" for name in folders("components")),
]


def _objects(what: str) -> tuple[Manifest, ...]:
    """An overlay, or the base with components: without TLS, where none of them says how calls are secured."""
    kind, _, name = what.partition(" ")
    if kind == "overlay":
        return rendered(name)
    components = name.split("+")
    return composed(*components) if components[0] in SECURITY else composed("plaintext", *components)


every = pytest.mark.parametrize("what", EVERYTHING)
each_service = pytest.mark.parametrize("service", SERVICES)


@cache
def _settings(what: str, service: str) -> Any:
    """The service's own settings, as its process would read them."""
    objects = _objects(what)
    spec = container(objects, service)
    told = {name: value for name, value in environment(objects, service).items() if name.startswith(PREFIX)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with mock.patch.dict(os.environ, {**kept, **told}, clear=True):
        return SETTINGS[service].from_command_line(list(spec.get("args", ())), program=service)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@every
@each_service
def test_every_variable_is_a_setting_that_takes_its_value(what: str, service: str) -> None:
    objects = _objects(what)
    told = {name for name in environment(objects, service) if name.startswith(PREFIX)}
    known = {PREFIX + name.upper() for name in SETTINGS[service].model_fields}
    assert told - known == set()
    settings = _settings(what, service)
    assert settings.model == environment(objects, service)["OUTRIDER_MODEL"]


@every
@each_service
def test_ports_are_those_that_the_service_listens_at(what: str, service: str) -> None:
    objects = _objects(what)
    settings = _settings(what, service)
    listening = {
        "grpc": settings.listen,
        "health": settings.health_listen,
        "metrics": settings.metrics_listen,
    }
    ports = {port["name"]: port["containerPort"] for port in container(objects, service)["ports"]}
    assert ports == {name: _port(address) for name, address in listening.items()}
    # At all addresses of the pod: on its loopback nobody would find it.
    assert {address.rpartition(":")[0] for address in listening.values()} == {"0.0.0.0"}


@every
@each_service
def test_probes_ask_for_what_health_answers(what: str, service: str) -> None:
    objects = _objects(what)
    spec = container(objects, service)
    asked = {kind: spec[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["service"] for kind, probe in asked.items()} == {name: name for name in PROBES}
    assert {probe["port"] for probe in asked.values()} == {_port(_settings(what, service).health_listen)}


@every
@each_service
def test_a_pod_has_time_to_drain(what: str, service: str) -> None:
    objects = _objects(what)
    settings = _settings(what, service)
    command = container(objects, service)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert pod(objects, service)["spec"]["terminationGracePeriodSeconds"] > int(command[1]) + settings.grace


@every
@each_service
def test_a_pod_has_time_to_start(what: str, service: str) -> None:
    objects = _objects(what)
    probe = container(objects, service)["startupProbe"]
    budget = probe["periodSeconds"] * probe["failureThreshold"]
    assert budget >= 900
    made = workload(objects, service)
    if made["kind"] == "Deployment":  # a group has no deadline
        assert made["spec"]["progressDeadlineSeconds"] > budget


@every
def test_a_slow_step_of_the_engine_is_no_reason_to_kill_a_pod(what: str) -> None:
    for service in SERVICES:
        probe = container(_objects(what), service)["livenessProbe"]
        # Liveness is NOT_SERVING only after its own bound; the probes come on top of it.
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 30
        assert _settings(what, service).liveness_timeout > 0


@every
@each_service
def test_threads_have_the_cores_that_they_need(what: str, service: str) -> None:
    objects = _objects(what)
    resources = container(objects, service)["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"]
    ranks = ranks_of_a_pod(container(objects, service), environment(objects, service))
    assert _settings(what, service).threads * ranks == int(resources["limits"]["cpu"])


@every
def test_drafts_call_a_service_that_selects_verifiers(what: str) -> None:
    objects = _objects(what)
    (address,) = _settings(what, "draft").verifier
    host, _, port = address.rpartition(":")
    (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == host)
    assert selects({"matchLabels": service["spec"]["selector"]}, pod(objects, "verifier")["metadata"]["labels"])
    # A headless Service forwards no port: the pod's own is what is called.
    assert {entry["port"] for entry in service["spec"]["ports"] if entry["name"] == "grpc"} == {int(port)}
    assert int(port) == _port(_settings(what, "verifier").listen)


@every
@each_service
def test_files_that_settings_name_are_mounted(what: str, service: str) -> None:
    objects = _objects(what)
    settings = _settings(what, service)
    mounted = {mount["mountPath"]: mount for mount in container(objects, service)["volumeMounts"]}
    files = [str(value) for name, value in settings if name.endswith(("_cert", "_key", "_ca", "_file")) and value]
    assert bool(files) == ("mtls" in what)
    for file in files:
        folder, _, name = file.rpartition("/")
        assert mounted[folder]["readOnly"]
        assert name in ("tls.crt", "tls.key", "ca.crt"), "a Secret of cert-manager has these keys"
    if not settings.model.startswith("/opt/outrider/"):
        assert mounted[settings.model]["readOnly"]


@every
@each_service
def test_plaintext_is_asked_for_or_there_is_tls(what: str, service: str) -> None:
    settings = _settings(what, service)
    assert settings.plaintext == (settings.tls_cert is None)
    if settings.tls_cert is not None:
        assert settings.tls_key is not None
        assert settings.tls_client_ca is not None
        assert settings.allow_client_san


@pytest.mark.parametrize("what", SECURED)
def test_names_in_certificates_are_those_that_are_asked_for(what: str) -> None:
    objects = _objects(what)
    names = {
        each["metadata"]["name"]: (set(each["spec"].get("dnsNames", ())), set(each["spec"].get("usages", ())))
        for each in of_kind(objects, "Certificate")
    }
    draft, verifier = _settings(what, "draft"), _settings(what, "verifier")
    assert draft.verifier_tls_name in names["outrider-verifier"][0]
    assert set(verifier.allow_client_san) <= names["outrider-draft"][0]
    assert set(draft.allow_client_san) <= names["outrider-client"][0]
    # A client is no draft, whoever signed for it.
    assert not set(verifier.allow_client_san) & names["outrider-client"][0]
    assert {"server auth", "client auth"} <= names["outrider-draft"][1]
    assert "client auth" not in names["outrider-verifier"][1]
    assert "server auth" not in names["outrider-client"][1]


def test_a_connection_ages_where_clients_balance_by_themselves() -> None:
    for overlay in folders("overlays"):
        assert _settings(f"overlay {overlay}", "draft").max_connection_age is not None


def test_weights_come_before_the_service_starts() -> None:
    what = "component hub-weights"
    objects = _objects(what)
    for service in SERVICES:
        spec = pod(objects, service)["spec"]
        (init,) = spec["initContainers"]
        (model,) = (volume for volume in spec["volumes"] if volume["name"] == "model")
        assert "emptyDir" in model
        assert "persistentVolumeClaim" not in model
        assert init["image"] == spec["containers"][0]["image"]
        assert environment(objects, service, init=True)["HF_HUB_OFFLINE"] == "0"
        assert environment(objects, service)["HF_HUB_OFFLINE"] == "1"
        target = init["command"][init["command"].index("--local-dir") + 1]
        assert target == _settings(what, service).model
        # An overlay says which, in the ConfigMap that the service has as well.
        assert {"$(HUB_MODEL)", "$(HUB_REVISION)"} <= set(init["command"])
        assert init["envFrom"] == spec["containers"][0]["envFrom"]
