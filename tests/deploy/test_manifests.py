"""Manifests render, the API server would accept them, and they fit each other and the services' settings."""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from outrider.rpc.health import PROBES
from outrider.runtime.checkpoint import OTHER_FORMATS, TEXTS
from tests.deploy.manifests import (
    CUSTOM,
    DEPLOY,
    GROUP,
    PREFIX,
    SERVICES,
    SETTINGS,
    Deployed,
    of_kind,
    rendered,
    selects,
    the,
    torchrun_arguments,
)


def _folders(kind: str) -> list[str]:
    return sorted(path.parent.name for path in (DEPLOY / kind).glob("*/kustomization.yaml"))


# The oldest release with stable gRPC probes, and the newest one there are schemas of.
RELEASES = ("1.27", "1.37")
SECURITY = ("plaintext", "mtls")
COMPONENTS = [name for name in _folders("components") if name not in SECURITY]
OVERLAYS = [f"overlays/{name}" for name in _folders("overlays")]
# Components with the one that changes most; `plaintext` is in the overlays.
SOURCES = [*OVERLAYS, *SECURITY, *(f"mtls+{name}" for name in COMPONENTS)]

every = pytest.mark.parametrize("source", SOURCES)


def both(source: str) -> tuple[Deployed, Deployed]:
    return Deployed(source, "draft"), Deployed(source, "verifier")


@pytest.fixture(params=itertools.product(SOURCES, SERVICES), ids=" ".join)
def deployed(request: pytest.FixtureRequest) -> Deployed:
    return Deployed(*request.param)


# --------------------------------------------------------------------------------------------------------- schemas


@cache
def _validate(document: str, release: str) -> None:
    """Most objects are in several overlays, and validated once."""
    kubernetes_validate.validate(json.loads(document), release, strict=True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("source", ["base", *SOURCES])
def test_the_api_server_would_accept_it(source: str, release: str) -> None:
    known = [each for each in rendered(source) if not each["apiVersion"].startswith(CUSTOM)]
    for each in known:
        _validate(json.dumps(each, sort_keys=True), release)
    assert len(known) == len(rendered(source)) or source not in ("base", "overlays/demo")


def _fields(value: Any) -> Iterator[str]:
    """The names of all fields, but of those that a patch deletes."""
    if isinstance(value, dict) and "$patch" not in value:
        for name, each in value.items():
            if each is not None:
                yield name
                yield from _fields(each)
    elif isinstance(value, list):
        for each in value:
            yield from _fields(each)


def _written(folder: Path) -> Iterator[Any]:
    """The objects in the files of a folder, patches among them."""
    file = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    no_objects = {"kustomization.yaml", *file.get("configurations", ())}
    texts = [patch["patch"] for patch in file.get("patches", ()) if "patch" in patch]
    texts += [path.read_text(encoding="utf-8") for path in folder.glob("*.yaml") if path.name not in no_objects]
    return (each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if isinstance(each, dict))


@pytest.mark.parametrize("folder", ["base", *OVERLAYS, *(f"components/{name}" for name in _folders("components"))])
def test_no_field_is_lost_on_the_way(folder: str) -> None:
    """A patch silently drops fields that the schema of its kind does not have."""
    name = folder.removeprefix("components/")
    objects = rendered(f"plaintext+{name}" if name in COMPONENTS else name)
    assert set(_fields(list(_written(DEPLOY / folder)))) - set(_fields(list(objects))) == set()


# ------------------------------------------------------------------------------------------------------------- pods


def test_containers_have_no_privilege_and_a_read_only_root(deployed: Deployed) -> None:
    spec = deployed.spec
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for each in (*spec["containers"], *spec.get("initContainers", ())):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }


def test_a_pod_with_a_gpu_tolerates_its_nodes_and_leaves_before_the_next_comes(deployed: Deployed) -> None:
    on_gpu = "nvidia.com/gpu" in deployed.container["resources"]["limits"]
    tolerated = [each["key"] for each in deployed.spec.get("tolerations", ())]
    spec = deployed.workload["spec"]
    groups = spec.get("rolloutStrategy")
    rolling = groups["rollingUpdateConfiguration"] if groups else spec["strategy"]["rollingUpdate"]
    assert ("nvidia.com/gpu" in tolerated) == on_gpu
    assert (rolling == {"maxSurge": 0, "maxUnavailable": 1}) == on_gpu
    assert deployed.container["image"].endswith("-cuda" if on_gpu else "-cpu")
    assert (deployed.settings.device == "cuda") == on_gpu, "else it would run on the CPU in silence"


def test_the_cores_of_a_pod_can_be_pinned(deployed: Deployed) -> None:
    """Each container, init containers too, requests what its limits are."""
    for each in (*deployed.spec["containers"], *deployed.spec.get("initContainers", ())):
        requests, limits = each["resources"]["requests"], each["resources"]["limits"]
        assert (requests["cpu"], requests["memory"]) == (limits["cpu"], limits["memory"])
        assert limits["cpu"].isdigit()


def test_one_node_has_both() -> None:
    draft, verifier = both("overlays/same-node")
    (near,) = draft.spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["topologyKey"] == "kubernetes.io/hostname"
    assert selects(near["labelSelector"], verifier.labels)
    local = the(draft.objects, "Service", "outrider-verifier-local")["spec"]
    assert local["internalTrafficPolicy"] == "Local"
    assert "clusterIP" not in local, "only a Service with a virtual address keeps traffic on its node"


# --------------------------------------------------------------------------------------------------------- settings


def test_every_variable_is_a_setting_that_takes_its_value(deployed: Deployed) -> None:
    given = {name for name in deployed.environment if name.startswith(PREFIX)}
    assert given <= {PREFIX + name.upper() for name in SETTINGS[deployed.service].model_fields}
    assert deployed.settings.model == deployed.environment["OUTRIDER_MODEL"]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_ports_and_probes_are_those_of_the_service(deployed: Deployed) -> None:
    settings = deployed.settings
    listening = {"grpc": settings.listen, "health": settings.health_listen, "metrics": settings.metrics_listen}
    assert deployed.ports == {name: _port(address) for name, address in listening.items()}
    # At all addresses of the pod: its loopback cannot be reached from outside.
    assert {address.rpartition(":")[0] for address in listening.values()} == {"0.0.0.0"}
    probes = {kind: deployed.container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["service"] for kind, probe in probes.items()} == {name: name for name in PROBES}
    assert {probe["port"] for probe in probes.values()} == {_port(settings.health_listen)}


def test_a_pod_has_time_to_start_and_to_drain(deployed: Deployed) -> None:
    container, settings = deployed.container, deployed.settings
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert deployed.spec["terminationGracePeriodSeconds"] > int(seconds) + settings.grace
    startup = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    if deployed.workload["kind"] == "Deployment":  # a group has neither
        spec = deployed.workload["spec"]
        assert spec["progressDeadlineSeconds"] > startup + spec["minReadySeconds"]


@every
def test_callers_find_a_new_pod_before_the_last_old_one_ends(source: str) -> None:
    draft, verifier = both(source)
    cached = 30  # seconds, in the DNS cache of most clusters
    for each, found_after in ((draft, cached), (verifier, cached + draft.settings.verifier_resolve_interval)):
        if each.workload["kind"] == "Deployment":
            assert each.workload["spec"]["minReadySeconds"] >= found_after


def test_threads_have_the_cores_that_they_need(deployed: Deployed) -> None:
    limits = deployed.container["resources"]["limits"]
    arguments = torchrun_arguments(deployed.container, {**GROUP, **deployed.environment})
    ranks = int(arguments.nproc_per_node) if arguments else 1
    assert deployed.settings.threads * ranks == int(limits["cpu"])


@every
def test_drafts_call_a_service_that_selects_verifiers(source: str) -> None:
    draft, verifier = both(source)
    (address,) = draft.settings.verifier
    service = the(draft.objects, "Service", address.rpartition(":")[0])["spec"]
    assert selects({"matchLabels": service["selector"]}, verifier.labels)
    # A headless Service forwards no port: clients call the pod's own.
    assert {entry["port"] for entry in service["ports"] if entry["name"] == "grpc"} == {_port(address)}
    assert _port(address) == _port(verifier.settings.listen)


def test_calls_are_plaintext_or_files_of_tls_are_mounted(deployed: Deployed) -> None:
    settings = deployed.settings
    mounted = {mount["mountPath"]: mount for mount in deployed.container["volumeMounts"]}
    files = [str(value) for name, value in settings if name.endswith(("_cert", "_key", "_ca", "_file")) and value]
    for file in files:
        folder, _, name = file.rpartition("/")
        assert mounted[folder]["readOnly"]
        assert name in ("tls.crt", "tls.key", "ca.crt"), "a Secret of cert-manager has these keys"
    if not settings.model.startswith("/opt/outrider/"):
        assert mounted[settings.model]["readOnly"]
    assert settings.plaintext == (settings.tls_cert is None) == (not files)
    assert bool(settings.tls_key and settings.tls_client_ca and settings.allow_client_san) == bool(files)


@pytest.mark.parametrize("source", [source for source in SOURCES if "mtls" in source])
def test_certificates_have_the_names_that_peers_check(source: str) -> None:
    draft, verifier = both(source)
    certificates = {each["metadata"]["name"]: each["spec"] for each in of_kind(draft.objects, "Certificate")}
    names = {name: set(spec.get("dnsNames", ())) for name, spec in certificates.items()}
    usages = {name: set(spec.get("usages", ())) for name, spec in certificates.items()}
    assert draft.settings.verifier_tls_name in names["outrider-verifier"]
    assert "outrider-draft" in names["outrider-draft"], "clients call it by the name of its Service"
    assert set(verifier.settings.allow_client_san) <= names["outrider-draft"]
    assert set(draft.settings.allow_client_san) <= names["outrider-client"]
    # A client is no draft service, although the same authority has signed its certificate.
    assert not set(verifier.settings.allow_client_san) & names["outrider-client"]
    assert {"server auth", "client auth"} <= usages["outrider-draft"]
    assert "client auth" not in usages["outrider-verifier"]
    issuers = {each["metadata"]["name"] for each in of_kind(draft.objects, "Issuer")}
    assert {spec["issuerRef"]["name"] for spec in certificates.values()} <= issuers
    secrets = {spec["secretName"] for spec in certificates.values()}
    for each in (draft, verifier):
        (mounted,) = (volume["secret"] for volume in each.spec["volumes"] if "secret" in volume)
        assert mounted["secretName"] in secrets
        # Readable only for the group that the kubelet gives the files.
        assert mounted["defaultMode"] == 0o440


def test_weights_come_before_the_service_starts() -> None:
    for each in both("plaintext+hub-weights"):
        (init,) = each.spec["initContainers"]
        assert init["image"] == each.container["image"]
        assert each.environment_of(init)["HF_HUB_OFFLINE"] == "0"
        assert each.environment["HF_HUB_OFFLINE"] == "1"
        # An overlay names them in the ConfigMap that the service has as well.
        given = {"$(HUB_MODEL)", "--revision=$(HUB_REVISION)", f"--local-dir={each.settings.model}"}
        assert given <= set(init["command"])
        # The files that a service downloads itself.
        assert {f"--include={each}" for each in (*TEXTS, "*.safetensors", "*.py")} <= set(init["command"])
        assert {f"--exclude={each}" for each in OTHER_FORMATS} <= set(init["command"])
        assert init["envFrom"] == each.container["envFrom"]
        (volume,) = (volume["emptyDir"] for volume in each.spec["volumes"] if volume["name"] == "model")
        assert init["resources"]["requests"]["ephemeral-storage"] == volume["sizeLimit"]


# -------------------------------------------------------------------------------------------- selectors and policies


@every
def test_services_and_budgets_find_the_pods_of_their_name(source: str) -> None:
    for each in both(source):
        budget = the(each.objects, "PodDisruptionBudget", each.name)["spec"]
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        headless = the(each.objects, "Service", each.name)["spec"]
        assert headless["clusterIP"] == "None"
        own = each.workload["spec"].get("selector", budget["selector"])  # a group has none
        for selector in (own, budget["selector"], {"matchLabels": headless["selector"]}):
            assert [other.service for other in both(source) if selects(selector, other.labels)] == [each.service]
        assert {port["targetPort"] for port in headless["ports"]} <= set(each.ports)
        the(each.objects, "ServiceAccount", each.spec["serviceAccountName"])


def _allowed(deployed: Deployed, way: str) -> list[tuple[Any, int]]:
    """Peer and port of all that policies allow into a service's pods, or out."""
    peers = "from" if way == "ingress" else "to"
    return [
        (peer, port["port"])
        for policy in of_kind(deployed.objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], deployed.labels)
        for rule in policy["spec"].get(way, ())
        for peer, port in itertools.product(rule.get(peers, [None]), rule["ports"])
    ]


def _admits(peer: Any, namespace: dict[str, str], labels: Any, *, same: bool) -> bool:
    """Say whether a peer of a policy matches pods with such labels in such a namespace; `same` is the policy's own."""
    if peer is None:
        return True
    if "ipBlock" in peer:
        return False
    there = selects(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else same
    return there and selects(peer.get("podSelector", {}), labels)


MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
CLIENT = {"outrider-client": "true"}


@every
def test_policies_admit_callers_and_the_monitoring_alone(source: str) -> None:
    draft, verifier = both(source)
    for to, port, namespace, labels, same, may in (
        (verifier, "grpc", {}, draft.labels, True, True),
        (draft, "grpc", {}, CLIENT, True, True),
        (draft, "grpc", CLIENT, CLIENT, False, True),
        (verifier, "grpc", {}, CLIENT, True, False),
        (verifier, "grpc", CLIENT, draft.labels, False, False),
        (draft, "grpc", {}, CLIENT, False, False),
        (draft, "grpc", CLIENT, {}, False, False),
        (draft, "grpc", {}, {}, True, False),
        (draft, "metrics", MONITORING, {}, False, True),
        (verifier, "metrics", MONITORING, {}, False, True),
        (verifier, "metrics", {}, CLIENT, True, False),
        (verifier, "grpc", MONITORING, {}, False, False),
    ):
        peers = [peer for peer, number in _allowed(to, "ingress") if number == to.ports[port]]
        assert any(_admits(peer, namespace, labels, same=same) for peer in peers) == may, (to.service, port, labels)


@every
def test_policies_let_out_dns_and_calls_of_verifiers_alone(source: str) -> None:
    _, verifier = both(source)
    for each in both(source):
        allowed = _allowed(each, "egress")
        assert {port for peer, port in allowed if peer is None} == {53}
        to_verifiers = {port for peer, port in allowed if _admits(peer, {}, verifier.labels, same=True)}
        assert (50052 in to_verifiers) == (each.service == "draft")
        outside = {port for peer, port in allowed if peer is not None and "ipBlock" in peer}
        assert outside == ({443} if "hub-weights" in source else set())


# ----------------------------------------------------------------------------------------------------- custom resources


def test_monitors_rules_and_dashboards_are_whole() -> None:
    objects = rendered("plaintext+monitoring")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    services = of_kind(objects, "Service")
    found = [each for each in services if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
    assert {each["metadata"]["name"] for each in found} == {f"outrider-{service}" for service in SERVICES}
    assert all(endpoint["port"] in {port["name"] for port in each["spec"]["ports"]} for each in found)
    (rules,) = of_kind(objects, "PrometheusRule")
    assert any("alert" in rule for group in rules["spec"]["groups"] for rule in group["rules"])
    maps = of_kind(objects, "ConfigMap")
    boards = [each for each in maps if "grafana_dashboard" in each["metadata"].get("labels", {})]
    assert boards
    panels = [panel for board in boards for text in board["data"].values() for panel in json.loads(text)["panels"]]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert queries
    assert all('{namespace=~"$namespace", job=~"$job"' in query for query in queries)


@pytest.mark.parametrize(("scaler", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_a_scaler_alone_sets_the_replicas_of_each_deployment(scaler: str, kind: str) -> None:
    source = f"plaintext+{scaler}"
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in of_kind(rendered(source), kind)]
    assert sorted(targets) == [f"outrider-{service}" for service in SERVICES]
    assert all("replicas" not in each.workload["spec"] for each in both(source))


def test_an_empty_answer_of_prometheus_scales_nothing() -> None:
    scalers = of_kind(rendered("plaintext+keda"), "ScaledObject")
    triggers = [trigger["metadata"] for each in scalers for trigger in each["spec"]["triggers"]]
    assert {each["ignoreNullValues"] for each in triggers} == {"false"}
    assert {each["spec"]["fallback"]["behavior"] for each in scalers} == {"currentReplicas"}
