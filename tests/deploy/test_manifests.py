"""Manifests render, and are what the API server would take: by its schemas, strictly, and else by checks of our own."""

import itertools
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import (
    DEPLOY,
    SERVICES,
    Manifest,
    base,
    composed,
    container,
    folders,
    of_kind,
    pod,
    rendered,
    selects,
    the,
    workload,
)

# The oldest release with gRPC probes for good, and the newest one there are schemas of.
RELEASES = ("1.27", "1.37")

CUSTOM = {
    "cert-manager.io/v1": {"Certificate", "Issuer"},
    "monitoring.coreos.com/v1": {"PrometheusRule", "ServiceMonitor"},
    "keda.sh/v1alpha1": {"ScaledObject"},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet"},
}
COMPONENTS = [name for name in folders("components") if name not in ("plaintext", "mtls")]
SCALERS = ("hpa", "keda")


WHAT = [
    *(f"overlays/{name}" for name in folders("overlays")),
    *(f"{security}+{name}" for security, name in itertools.product(("plaintext", "mtls"), COMPONENTS)),
]


def _objects(what: str) -> tuple[Manifest, ...]:
    if what.startswith("overlays/"):
        return rendered(what.removeprefix("overlays/"))
    return composed(*what.split("+"))


@cache
def _problem(document: str, release: str) -> str:
    """What the schemas of a release have against an object; most are in several overlays, and judged once."""
    try:
        kubernetes_validate.validate(json.loads(document), release, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


def _is_custom(each: Manifest) -> bool:
    return each["kind"] in CUSTOM.get(each["apiVersion"], ())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("what", WHAT)
def test_the_api_server_would_take_it(what: str, release: str) -> None:
    judged = [each for each in _objects(what) if not _is_custom(each)]
    assert judged
    problems = [(each["kind"], _problem(json.dumps(each, sort_keys=True), release)) for each in judged]
    assert [problem for problem in problems if problem[1]] == []


def test_a_typing_error_would_be_found() -> None:
    # The point of strict schemas: the API server of old would have dropped the field without a word.
    wrong = json.loads(json.dumps(the(rendered("demo"), "Deployment", "outrider-draft")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert "readinesProbe" in _problem(json.dumps(wrong), RELEASES[0])


def _fields(value: Any) -> set[str]:
    """The names of all fields, but of those that are taken out."""
    if isinstance(value, dict):
        if "$patch" in value:
            return set()
        kept = {name: each for name, each in value.items() if each is not None}
        return set(kept).union(*map(_fields, kept.values()))
    return set().union(*map(_fields, value)) if isinstance(value, list) else set()


def _written(folder: Path) -> list[Any]:
    """What the files of a folder say, patches among it."""
    file = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    texts = [patch["patch"] for patch in file.get("patches", ()) if "patch" in patch]
    no_objects = {"kustomization.yaml", *file.get("configurations", ())}
    texts += [path.read_text(encoding="utf-8") for path in folder.glob("*.yaml") if path.name not in no_objects]
    return [each for text in texts for each in yaml.safe_load_all(text) if isinstance(each, dict)]


@pytest.mark.parametrize("what", ["base", *(f"overlays/{name}" for name in folders("overlays")), *COMPONENTS, "mtls"])
def test_no_field_is_lost_on_the_way(what: str) -> None:
    # A patch takes what the schema of its kind does not know out of both sides, without a word.
    if what == "base":
        written, objects = _written(DEPLOY / "base"), base()
    elif what.startswith("overlays/"):
        written, objects = _written(DEPLOY / what), _objects(what)
    else:
        written = _written(DEPLOY / "components" / what)
        objects = composed(what) if what == "mtls" else composed("plaintext", what)
    assert _fields(written) - _fields(list(objects)) == set()
    for each in base():
        assert _problem(json.dumps(each, sort_keys=True), RELEASES[0]) == ""


def test_the_base_asks_for_nothing_that_a_cluster_may_lack() -> None:
    kinds = {(each["apiVersion"], each["kind"]) for each in base()}
    assert {api for api, _ in kinds} == {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}
    counts = {kind: len(of_kind(base(), kind)) for _, kind in kinds}
    assert counts == {
        "Namespace": 1,
        "ServiceAccount": 2,
        "Service": 2,
        "Deployment": 2,
        "PodDisruptionBudget": 2,
        "NetworkPolicy": 3,
        "ConfigMap": 3,
    }


@pytest.mark.parametrize("what", ["overlays/demo", "overlays/same-node", "overlays/cross-node"])
def test_overlays_apply_to_any_cluster(what: str) -> None:
    assert [each for each in _objects(what) if _is_custom(each)] == []


@pytest.mark.parametrize("what", WHAT)
def test_every_object_is_named_and_labelled_as_ours(what: str) -> None:
    for each in _objects(what):
        assert each["metadata"]["name"].startswith("outrider") or each["kind"] == "Namespace"
        if each["kind"] not in ("Namespace", "ConfigMap"):
            assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "outrider"
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == ("outrider" if what.startswith("overlays/") else "elsewhere")


# ------------------------------------------------------------------------------------------------------------- pods


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("service", SERVICES)
def test_containers_have_no_privilege_and_a_root_they_cannot_write(what: str, service: str) -> None:
    spec = pod(_objects(what), service)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    for each in (*spec["containers"], *spec.get("initContainers", ())):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        writable = {mount["mountPath"] for mount in each["volumeMounts"] if not mount.get("readOnly")}
        assert {"/cache", "/tmp"} <= writable
        kinds = {volume["name"]: set(volume) - {"name"} for volume in spec["volumes"]}
        named = {mount["name"] for mount in each["volumeMounts"]}
        assert all(kinds[name] <= {"emptyDir", "secret", "persistentVolumeClaim"} for name in named)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("service", SERVICES)
def test_who_takes_a_gpu_tolerates_its_nodes_and_makes_room_first(what: str, service: str) -> None:
    objects = _objects(what)
    limits = container(objects, service)["resources"]["limits"]
    tolerated = [each["key"] for each in pod(objects, service)["spec"].get("tolerations", ())]
    spec = workload(objects, service)["spec"]
    groups = spec.get("rolloutStrategy")
    rolling = groups["rollingUpdateConfiguration"] if groups else spec["strategy"]["rollingUpdate"]
    on_gpu = "nvidia.com/gpu" in limits
    assert ("nvidia.com/gpu" in tolerated) == on_gpu
    assert (rolling == {"maxSurge": 0, "maxUnavailable": 1}) == on_gpu
    # CUDA's libraries are 4 GB that only a GPU is worth.
    assert container(objects, service)["image"].endswith("-cuda" if on_gpu else "-cpu")


def test_the_demo_asks_for_no_gpu_no_volume_and_little_else() -> None:
    for service in SERVICES:
        spec = container(rendered("demo"), service)
        assert spec["resources"]["limits"] == {"cpu": "1", "memory": "1536Mi"}
        assert {"cache", "tmp", "shm"} == {
            volume["name"] for volume in pod(rendered("demo"), service)["spec"]["volumes"]
        }


def test_one_node_has_both() -> None:
    objects = rendered("same-node")
    (near,) = pod(objects, "draft")["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["topologyKey"] == "kubernetes.io/hostname"
    assert selects(near["labelSelector"], pod(objects, "verifier")["metadata"]["labels"])
    local = the(objects, "Service", "outrider-verifier-local")["spec"]
    assert local["internalTrafficPolicy"] == "Local"
    assert "clusterIP" not in local, "only a Service with a virtual address keeps traffic on its node"


def test_pools_are_apart_and_spread() -> None:
    objects = rendered("cross-node")
    pools = {service: pod(objects, service)["spec"]["nodeSelector"] for service in SERVICES}
    assert pools["draft"] != pools["verifier"]
    for service in SERVICES:
        spread = pod(objects, service)["spec"]["topologySpreadConstraints"]
        assert {each["topologyKey"] for each in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        for each in spread:
            assert selects(each["labelSelector"], pod(objects, service)["metadata"]["labels"])


# ------------------------------------------------------------------------------------------------------ who finds whom


@pytest.mark.parametrize("what", WHAT)
def test_services_and_budgets_find_the_pods_of_their_name(what: str) -> None:
    objects = _objects(what)
    labels = {service: pod(objects, service)["metadata"]["labels"] for service in SERVICES}
    for service in SERVICES:
        name = f"outrider-{service}"
        budget = the(objects, "PodDisruptionBudget", name)["spec"]
        headless = the(objects, "Service", name)["spec"]
        assert headless["clusterIP"] == "None"
        assert budget["maxUnavailable"] == 1
        own = workload(objects, service)["spec"].get("selector", budget["selector"])  # a group has none
        for found in (own, budget["selector"], {"matchLabels": headless["selector"]}):
            assert [each for each in SERVICES if selects(found, labels[each])] == [service]
        names = {port["name"] for port in container(objects, service)["ports"]}
        assert {port["targetPort"] for port in headless["ports"]} <= names
        account = pod(objects, service)["spec"]["serviceAccountName"]
        assert the(objects, "ServiceAccount", account)["automountServiceAccountToken"] is False


def _allowed(objects: tuple[Manifest, ...], service: str, way: str) -> list[tuple[Any, int, str]]:
    """(peer, port, protocol) of all that policies let into a service's pods, or out."""
    labels, peers = pod(objects, service)["metadata"]["labels"], "from" if way == "ingress" else "to"
    found: list[tuple[Any, int, str]] = []
    for policy in of_kind(objects, "NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], labels):
            for rule in policy["spec"].get(way, ()):
                for peer, port in itertools.product(rule.get(peers, [None]), rule["ports"]):
                    found.append((peer, port["port"], port["protocol"]))
    return found


def _admits(peer: Any, namespace: dict[str, str], labels: dict[str, str], *, same: bool) -> bool:
    """Whether a peer of a policy stands for pods with such labels in such a namespace; `same` is the policy's own."""
    if peer is None:
        return True
    if "ipBlock" in peer:
        return False
    there = selects(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else same
    return there and selects(peer.get("podSelector", {}), labels)


@pytest.mark.parametrize("what", WHAT)
def test_policies_let_in_who_has_business_and_nobody_else(what: str) -> None:
    objects = _objects(what)
    ports = {s: {p["name"]: p["containerPort"] for p in container(objects, s)["ports"]} for s in SERVICES}
    draft, verifier = (pod(objects, service)["metadata"]["labels"] for service in SERVICES)
    client, scraper = {"outrider-client": "true"}, {"kubernetes.io/metadata.name": "monitoring"}

    def may_enter(service: str, port: str, namespace: dict[str, str], labels: dict[str, str], *, same: bool) -> bool:
        allowed = _allowed(objects, service, "ingress")
        return any(
            number == ports[service][port] and _admits(peer, namespace, labels, same=same)
            for peer, number, _ in allowed
        )

    assert may_enter("verifier", "grpc", {}, draft, same=True)
    assert not may_enter("verifier", "grpc", {}, client, same=True)
    assert not may_enter("verifier", "grpc", {}, verifier, same=True)
    assert not may_enter("verifier", "grpc", client, draft, same=False)
    assert may_enter("draft", "grpc", {}, client, same=True)
    assert may_enter("draft", "grpc", client, client, same=False)
    assert not may_enter("draft", "grpc", {}, client, same=False)
    assert not may_enter("draft", "grpc", client, {}, same=False)
    assert not may_enter("draft", "grpc", {}, {}, same=True)
    for service in SERVICES:
        assert may_enter(service, "metrics", scraper, {}, same=False)
        assert not may_enter(service, "metrics", {}, client, same=True)
        assert not may_enter(service, "grpc", scraper, {}, same=False)
        policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
        bound = [spec for spec in policies if selects(spec["podSelector"], pod(objects, service)["metadata"]["labels"])]
        # What no policy names is shut only where one speaks of the direction at all.
        assert {way for spec in bound for way in spec["policyTypes"]} == {"Ingress", "Egress"}


@pytest.mark.parametrize("what", WHAT)
def test_policies_let_out_what_is_needed_and_no_more(what: str) -> None:
    objects = _objects(what)
    verifier = pod(objects, "verifier")["metadata"]["labels"]
    for service in SERVICES:
        allowed = _allowed(objects, service, "egress")
        assert {(port, protocol) for peer, port, protocol in allowed if peer is None} == {(53, "UDP"), (53, "TCP")}
        collectors = {
            port
            for peer, port, _ in allowed
            if _admits(peer, {"kubernetes.io/metadata.name": "monitoring"}, {}, same=False)
        }
        assert 4317 in collectors
        assert (50052 in {port for peer, port, _ in allowed if _admits(peer, {}, verifier, same=True)}) == (
            service == "draft"
        )
        outside = {port for peer, port, _ in allowed if peer is not None and "ipBlock" in peer}
        assert outside == ({443} if "hub-weights" in what else set())


# ----------------------------------------------------------------------------------------------------- custom resources


def test_monitors_find_what_shows_metrics() -> None:
    objects = composed("plaintext", "monitoring")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    found = [
        each for each in of_kind(objects, "Service") if selects(monitor["spec"]["selector"], each["metadata"]["labels"])
    ]
    assert {each["metadata"]["name"] for each in found} == {f"outrider-{service}" for service in SERVICES}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) == {"port", "path", "interval"}
    for each in found:
        assert endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}


def test_alert_rules_are_whole() -> None:
    (rules,) = of_kind(composed("plaintext", "monitoring"), "PrometheusRule")
    assert rules["apiVersion"] == "monitoring.coreos.com/v1"
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert set(alert) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert alert["expr"].count("(") == alert["expr"].count(")")
        assert alert["annotations"]


def test_the_dashboard_is_where_grafana_looks() -> None:
    objects = composed("plaintext", "monitoring")
    boards = [
        each for each in of_kind(objects, "ConfigMap") if "grafana_dashboard" in each["metadata"].get("labels", {})
    ]
    assert boards
    for board in boards:
        assert all(json.loads(text)["panels"] for text in board["data"].values())


def test_scalers_take_the_number_of_replicas_out_of_the_deployments() -> None:
    for scaler in SCALERS:
        for service in SERVICES:
            assert "replicas" not in the(composed("plaintext", scaler), "Deployment", f"outrider-{service}")["spec"]
    for overlay in folders("overlays"):
        for service in SERVICES:
            assert workload(rendered(overlay), service)["spec"]["replicas"] >= 1


@pytest.mark.parametrize("order", [SCALERS, SCALERS[::-1]])
def test_two_scalers_do_not_go_together(order: tuple[str, str]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        composed("plaintext", *order)
    assert "replicas" in refused.value.stderr


def test_each_scaler_has_each_deployment_once() -> None:
    for scaler, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        found = of_kind(composed("plaintext", scaler), kind)
        targets = [each["spec"]["scaleTargetRef"] for each in found]
        assert sorted(target["name"] for target in targets) == [f"outrider-{service}" for service in SERVICES]
        assert all(target["kind"] == "Deployment" for target in targets)


def test_keda_asks_for_what_the_monitor_names() -> None:
    objects = composed("plaintext", "keda")
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    for each in of_kind(objects, "ScaledObject"):
        assert set(each["spec"]) <= {
            "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers", "fallback", "advanced"
        }  # fmt: skip
        for trigger in each["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
            assert float(trigger["metadata"]["threshold"]) > 0
            # A job is named after the Service that was scraped.
            job = trigger["metadata"]["query"].partition('job="')[2].partition('"')[0]
            assert job == each["spec"]["scaleTargetRef"]["name"]
            assert job in services


def test_certificates_are_signed_by_an_issuer_that_is_there() -> None:
    objects = rendered("mtls")
    issuers = {each["metadata"]["name"]: each for each in of_kind(objects, "Issuer")}
    certificates = of_kind(objects, "Certificate")
    secrets = {each["spec"]["secretName"] for each in certificates}
    assert len(secrets) == len(certificates)
    for each in certificates:
        spec = each["spec"]
        assert spec["issuerRef"]["kind"] == "Issuer"
        assert spec["issuerRef"]["name"] in issuers
        assert set(spec) <= {
            "secretName", "duration", "renewBefore", "privateKey", "usages", "dnsNames", "issuerRef", "isCA",
            "commonName",
        }  # fmt: skip
        assert bool(spec.get("isCA")) != bool(spec.get("dnsNames"))
        if "renewBefore" in spec:
            assert int(spec["renewBefore"].removesuffix("h")) < int(spec["duration"].removesuffix("h"))
    (by_ca,) = (each["spec"]["ca"]["secretName"] for each in issuers.values() if "ca" in each["spec"])
    assert by_ca in secrets
    for service in SERVICES:
        (mounted,) = (volume["secret"] for volume in pod(objects, service)["spec"]["volumes"] if "secret" in volume)
        assert mounted["secretName"] in secrets
        # Readable for the group that the kubelet gives the files, and for nobody else.
        assert mounted["defaultMode"] == 0o440
