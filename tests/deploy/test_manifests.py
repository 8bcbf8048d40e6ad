"""Manifests render, are what the API server would take, and fit each other and the services' settings."""

import itertools
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from outrider.rpc.health import PROBES
from tests.deploy.manifests import (
    DEPLOY,
    PREFIX,
    SERVICES,
    SETTINGS,
    Deployed,
    Manifest,
    base,
    composed,
    folders,
    of_kind,
    rendered,
    selects,
    the,
)
from tests.deploy.torchrun import ranks_of_a_pod

# The oldest release with stable gRPC probes, and the newest one there are schemas of.
RELEASES = ("1.27", "1.37")
CUSTOM = {
    "cert-manager.io/v1": {"Certificate", "Issuer"},
    "monitoring.coreos.com/v1": {"PrometheusRule", "ServiceMonitor"},
    "keda.sh/v1alpha1": {"ScaledObject"},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet"},
}
SECURITY = ("plaintext", "mtls")
COMPONENTS = [name for name in folders("components") if name not in SECURITY]
OVERLAYS = [f"overlays/{name}" for name in folders("overlays")]
WHAT = [*OVERLAYS, *SECURITY, *(f"{security}+{name}" for security in SECURITY for name in COMPONENTS)]
SECURED = [what for what in WHAT if "mtls" in what]
SCALERS = ("hpa", "keda")

every = pytest.mark.parametrize("what", WHAT)


def objects_of(what: str) -> tuple[Manifest, ...]:
    if what == "base":
        return base()
    return rendered(what.removeprefix("overlays/")) if what.startswith("overlays/") else composed(*what.split("+"))


def both(what: str) -> tuple[Deployed, Deployed]:
    """The draft service, and the verifier."""
    draft, verifier = (Deployed(objects_of(what), service) for service in SERVICES)
    return draft, verifier


@pytest.fixture(params=itertools.product(WHAT, SERVICES), ids=" ".join)
def deployed(request: pytest.FixtureRequest) -> Deployed:
    what, service = request.param
    return Deployed(objects_of(what), service)


# --------------------------------------------------------------------------------------------------------- schemas


@cache
def _problem(document: str, release: str) -> str:
    """What the schemas of a release have against an object; most are in several overlays, and validated once."""
    try:
        kubernetes_validate.validate(json.loads(document), release, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


def _is_custom(each: Manifest) -> bool:
    return each["kind"] in CUSTOM.get(each["apiVersion"], ())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("what", ["base", *WHAT])
def test_the_api_server_would_take_it(what: str, release: str) -> None:
    known = [each for each in objects_of(what) if not _is_custom(each)]
    problems = [(each["kind"], _problem(json.dumps(each, sort_keys=True), release)) for each in known]
    assert known
    assert [problem for problem in problems if problem[1]] == []


def test_a_typing_error_would_be_found() -> None:
    # The point of strict schemas: an API server drops an unknown field in silence.
    wrong = json.loads(json.dumps(the(rendered("demo"), "Deployment", "outrider-draft")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert "readinesProbe" in _problem(json.dumps(wrong), RELEASES[0])


def _fields(value: Any) -> set[str]:
    """The names of all fields, but of those that a patch deletes."""
    if isinstance(value, dict):
        if "$patch" in value:
            return set()
        kept = {name: each for name, each in value.items() if each is not None}
        return set(kept).union(*map(_fields, kept.values()))
    return set().union(*map(_fields, value)) if isinstance(value, list) else set()


def _written(folder: Path) -> list[Any]:
    """What the files of a folder hold, patches among it."""
    file = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    texts = [patch["patch"] for patch in file.get("patches", ()) if "patch" in patch]
    no_objects = {"kustomization.yaml", *file.get("configurations", ())}
    texts += [path.read_text(encoding="utf-8") for path in folder.glob("*.yaml") if path.name not in no_objects]
    return [each for text in texts for each in yaml.safe_load_all(text) if isinstance(each, dict)]


@pytest.mark.parametrize("folder", ["base", *OVERLAYS, *(f"components/{name}" for name in folders("components"))])
def test_no_field_is_lost_on_the_way(folder: str) -> None:
    """A patch drops in silence what the schema of its kind does not know."""
    name = folder.removeprefix("components/")
    what = f"plaintext+{name}" if name in COMPONENTS else name
    assert _fields(_written(DEPLOY / folder)) - _fields(list(objects_of(what))) == set()


def test_the_base_and_simple_overlays_apply_to_any_cluster() -> None:
    counts = {kind: len(of_kind(base(), kind)) for kind in {each["kind"] for each in base()}}
    assert counts == {
        "Namespace": 1,
        "ServiceAccount": 2,
        "Service": 2,
        "Deployment": 2,
        "PodDisruptionBudget": 2,
        "NetworkPolicy": 3,
        "ConfigMap": 3,
    }
    for overlay in ("demo", "same-node", "cross-node"):
        assert [each for each in rendered(overlay) if _is_custom(each)] == []


@every
def test_every_object_is_named_and_labelled_as_ours(what: str) -> None:
    for each in objects_of(what):
        assert each["metadata"]["name"].startswith("outrider") or each["kind"] == "Namespace"
        if each["kind"] not in ("Namespace", "ConfigMap"):
            assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "outrider"
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == ("outrider" if what in OVERLAYS else "elsewhere")


# ------------------------------------------------------------------------------------------------------------- pods


def test_containers_have_no_privilege_and_a_read_only_root(deployed: Deployed) -> None:
    spec = deployed.spec
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    kinds = {volume["name"]: set(volume) - {"name"} for volume in spec["volumes"]}
    for each in (*spec["containers"], *spec.get("initContainers", ())):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in each["volumeMounts"] if not mount.get("readOnly")}
        named = {mount["name"] for mount in each["volumeMounts"]}
        assert all(kinds[name] <= {"emptyDir", "secret", "persistentVolumeClaim"} for name in named)


def test_a_pod_with_a_gpu_tolerates_its_nodes_and_leaves_before_the_next_comes(deployed: Deployed) -> None:
    on_gpu = "nvidia.com/gpu" in deployed.container["resources"]["limits"]
    tolerated = [each["key"] for each in deployed.spec.get("tolerations", ())]
    spec = deployed.workload["spec"]
    groups = spec.get("rolloutStrategy")
    rolling = groups["rollingUpdateConfiguration"] if groups else spec["strategy"]["rollingUpdate"]
    assert ("nvidia.com/gpu" in tolerated) == on_gpu
    assert (rolling == {"maxSurge": 0, "maxUnavailable": 1}) == on_gpu
    # CUDA's libraries are 4 GB that only a GPU is worth.
    assert deployed.container["image"].endswith("-cuda" if on_gpu else "-cpu")


def test_the_demo_asks_for_no_gpu_no_volume_and_little_else() -> None:
    for each in both("overlays/demo"):
        assert each.container["resources"]["limits"] == {"cpu": "1", "memory": "1536Mi"}
        assert {volume["name"] for volume in each.spec["volumes"]} == {"cache", "tmp", "shm"}


def test_one_node_has_both() -> None:
    draft, verifier = both("overlays/same-node")
    (near,) = draft.spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["topologyKey"] == "kubernetes.io/hostname"
    assert selects(near["labelSelector"], verifier.labels)
    local = the(draft.objects, "Service", "outrider-verifier-local")["spec"]
    assert local["internalTrafficPolicy"] == "Local"
    assert "clusterIP" not in local, "only a Service with a virtual address keeps traffic on its node"


def test_pools_are_apart_and_spread() -> None:
    draft, verifier = both("overlays/cross-node")
    assert draft.spec["nodeSelector"] != verifier.spec["nodeSelector"]
    for each in (draft, verifier):
        spread = each.spec["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        assert all(selects(one["labelSelector"], each.labels) for one in spread)


# --------------------------------------------------------------------------------------------------------- settings


def test_every_variable_is_a_setting_that_takes_its_value(deployed: Deployed) -> None:
    given = {name for name in deployed.environment if name.startswith(PREFIX)}
    assert given <= {PREFIX + name.upper() for name in SETTINGS[deployed.service].model_fields}
    assert deployed.settings.model == deployed.environment["OUTRIDER_MODEL"]


def test_ports_and_probes_are_those_that_the_service_has(deployed: Deployed) -> None:
    settings = deployed.settings
    listening = {"grpc": settings.listen, "health": settings.health_listen, "metrics": settings.metrics_listen}
    assert deployed.ports == {name: _port(address) for name, address in listening.items()}
    # At all addresses of the pod: on its loopback nobody would find it.
    assert {address.rpartition(":")[0] for address in listening.values()} == {"0.0.0.0"}
    probes = {kind: deployed.container[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["service"] for kind, probe in probes.items()} == {name: name for name in PROBES}
    assert {probe["port"] for probe in probes.values()} == {_port(settings.health_listen)}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_pod_has_time_to_start_to_step_and_to_drain(deployed: Deployed) -> None:
    container, settings = deployed.container, deployed.settings
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert deployed.spec["terminationGracePeriodSeconds"] > int(command[1]) + settings.grace
    startup, liveness = (
        container[kind]["periodSeconds"] * container[kind]["failureThreshold"]
        for kind in ("startupProbe", "livenessProbe")
    )
    assert startup >= 900
    if deployed.workload["kind"] == "Deployment":  # a group has no deadline
        assert deployed.workload["spec"]["progressDeadlineSeconds"] > startup
    # Liveness is NOT_SERVING only after its own bound; the probes come on top of it.
    assert liveness >= 30
    assert settings.liveness_timeout > 0


def test_threads_have_the_cores_that_they_need(deployed: Deployed) -> None:
    resources = deployed.container["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"]
    ranks = ranks_of_a_pod(deployed.container, deployed.environment)
    assert deployed.settings.threads * ranks == int(resources["limits"]["cpu"])


@every
def test_drafts_call_a_service_that_selects_verifiers(what: str) -> None:
    draft, verifier = both(what)
    (address,) = draft.settings.verifier
    service = the(draft.objects, "Service", address.rpartition(":")[0])["spec"]
    assert selects({"matchLabels": service["selector"]}, verifier.labels)
    # A headless Service forwards no port: the pod's own is what is called.
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
    if files:
        assert settings.tls_key
        assert settings.tls_client_ca
        assert settings.allow_client_san


@pytest.mark.parametrize("what", SECURED)
def test_names_in_certificates_are_those_that_are_asked_for(what: str) -> None:
    draft, verifier = both(what)
    certificates = {each["metadata"]["name"]: each["spec"] for each in of_kind(draft.objects, "Certificate")}
    names = {name: set(spec.get("dnsNames", ())) for name, spec in certificates.items()}
    usages = {name: set(spec.get("usages", ())) for name, spec in certificates.items()}
    assert draft.settings.verifier_tls_name in names["outrider-verifier"]
    assert set(verifier.settings.allow_client_san) <= names["outrider-draft"]
    assert set(draft.settings.allow_client_san) <= names["outrider-client"]
    # A client is no draft, whoever signed for it.
    assert not set(verifier.settings.allow_client_san) & names["outrider-client"]
    assert {"server auth", "client auth"} <= usages["outrider-draft"]
    assert "client auth" not in usages["outrider-verifier"]
    assert "server auth" not in usages["outrider-client"]


def test_a_connection_ages_where_clients_balance_by_themselves() -> None:
    assert all(both(overlay)[0].settings.max_connection_age is not None for overlay in OVERLAYS)


def test_weights_come_before_the_service_starts() -> None:
    for each in both("plaintext+hub-weights"):
        (init,) = each.spec["initContainers"]
        (model,) = (volume for volume in each.spec["volumes"] if volume["name"] == "model")
        assert "emptyDir" in model
        assert "persistentVolumeClaim" not in model
        assert init["image"] == each.container["image"]
        assert each.environment_of(init)["HF_HUB_OFFLINE"] == "0"
        assert each.environment["HF_HUB_OFFLINE"] == "1"
        assert init["command"][init["command"].index("--local-dir") + 1] == each.settings.model
        # An overlay says which, in the ConfigMap that the service has as well.
        assert {"$(HUB_MODEL)", "$(HUB_REVISION)"} <= set(init["command"])
        assert init["envFrom"] == each.container["envFrom"]


# ------------------------------------------------------------------------------------------------------ who finds whom


@every
def test_services_and_budgets_find_the_pods_of_their_name(what: str) -> None:
    for each in both(what):
        budget = the(each.objects, "PodDisruptionBudget", each.name)["spec"]
        headless = the(each.objects, "Service", each.name)["spec"]
        assert headless["clusterIP"] == "None"
        assert budget["maxUnavailable"] == 1
        own = each.workload["spec"].get("selector", budget["selector"])  # a group has none
        for selector in (own, budget["selector"], {"matchLabels": headless["selector"]}):
            assert [other.service for other in both(what) if selects(selector, other.labels)] == [each.service]
        assert {port["targetPort"] for port in headless["ports"]} <= set(each.ports)
        account = the(each.objects, "ServiceAccount", each.spec["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False


def _allowed(deployed: Deployed, way: str) -> list[tuple[Any, int, str]]:
    """(peer, port, protocol) of all that policies let into a service's pods, or out."""
    peers = "from" if way == "ingress" else "to"
    return [
        (peer, port["port"], port["protocol"])
        for policy in of_kind(deployed.objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], deployed.labels)
        for rule in policy["spec"].get(way, ())
        for peer, port in itertools.product(rule.get(peers, [None]), rule["ports"])
    ]


def _admits(peer: Any, namespace: dict[str, str], labels: dict[str, str], *, same: bool) -> bool:
    """Whether a peer of a policy stands for pods with such labels in such a namespace; `same` is the policy's own."""
    if peer is None:
        return True
    if "ipBlock" in peer:
        return False
    there = selects(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else same
    return there and selects(peer.get("podSelector", {}), labels)


MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
CLIENT = {"outrider-client": "true"}


@every
def test_policies_let_in_who_has_business_and_nobody_else(what: str) -> None:
    draft, verifier = both(what)

    def may_enter(to: Deployed, port: str, namespace: Any, labels: Any, *, same: bool) -> bool:
        return any(
            number == to.ports[port] and _admits(peer, namespace, labels, same=same)
            for peer, number, _ in _allowed(to, "ingress")
        )

    assert may_enter(verifier, "grpc", {}, draft.labels, same=True)
    assert may_enter(draft, "grpc", {}, CLIENT, same=True)
    assert may_enter(draft, "grpc", CLIENT, CLIENT, same=False)
    for to, namespace, labels, same in (
        (verifier, {}, CLIENT, True),
        (verifier, {}, verifier.labels, True),
        (verifier, CLIENT, draft.labels, False),
        (draft, {}, CLIENT, False),
        (draft, CLIENT, {}, False),
        (draft, {}, {}, True),
    ):
        assert not may_enter(to, "grpc", namespace, labels, same=same)
    for to in (draft, verifier):
        assert may_enter(to, "metrics", MONITORING, {}, same=False)
        assert not may_enter(to, "metrics", {}, CLIENT, same=True)
        assert not may_enter(to, "grpc", MONITORING, {}, same=False)
        policies = [each["spec"] for each in of_kind(to.objects, "NetworkPolicy")]
        bound = [spec for spec in policies if selects(spec["podSelector"], to.labels)]
        # What no policy names is shut only where one speaks of the direction at all.
        assert {way for spec in bound for way in spec["policyTypes"]} == {"Ingress", "Egress"}


@every
def test_policies_let_out_what_is_needed_and_no_more(what: str) -> None:
    _, verifier = both(what)
    for each in both(what):
        allowed = _allowed(each, "egress")
        assert {(port, protocol) for peer, port, protocol in allowed if peer is None} == {(53, "UDP"), (53, "TCP")}
        assert 4317 in {port for peer, port, _ in allowed if _admits(peer, MONITORING, {}, same=False)}
        to_verifiers = {port for peer, port, _ in allowed if _admits(peer, {}, dict(verifier.labels), same=True)}
        assert (50052 in to_verifiers) == (each.service == "draft")
        outside = {port for peer, port, _ in allowed if peer is not None and "ipBlock" in peer}
        assert outside == ({443} if "hub-weights" in what else set())


# ----------------------------------------------------------------------------------------------------- custom resources


def test_monitors_rules_and_dashboards_are_whole() -> None:
    objects = composed("plaintext", "monitoring")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    assert set(endpoint) == {"port", "path", "interval"}
    services = of_kind(objects, "Service")
    found = [each for each in services if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
    assert {each["metadata"]["name"] for each in found} == {f"outrider-{service}" for service in SERVICES}
    assert all(endpoint["port"] in {port["name"] for port in each["spec"]["ports"]} for each in found)
    (rules,) = of_kind(objects, "PrometheusRule")
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert set(alert) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert alert["annotations"]
    maps = of_kind(objects, "ConfigMap")
    boards = [each for each in maps if "grafana_dashboard" in each["metadata"].get("labels", {})]
    assert boards
    assert all(json.loads(text)["panels"] for board in boards for text in board["data"].values())


@pytest.mark.parametrize(("scaler", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_a_scaler_has_each_deployment_once_and_its_number_of_replicas(scaler: str, kind: str) -> None:
    objects = composed("plaintext", scaler)
    targets = [each["spec"]["scaleTargetRef"] for each in of_kind(objects, kind)]
    assert sorted(target["name"] for target in targets) == [f"outrider-{service}" for service in SERVICES]
    assert {target["kind"] for target in targets} == {"Deployment"}
    assert all("replicas" not in Deployed(objects, service).workload["spec"] for service in SERVICES)
    for overlay in OVERLAYS:
        assert all(each.workload["spec"]["replicas"] >= 1 for each in both(overlay))


@pytest.mark.parametrize("order", [SCALERS, SCALERS[::-1]])
def test_two_scalers_do_not_go_together(order: tuple[str, str]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        composed("plaintext", *order)
    assert "replicas" in refused.value.stderr


def test_keda_asks_for_what_the_monitor_names() -> None:
    objects = composed("plaintext", "keda")
    fields = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers", "fallback", "advanced"}
    for each in of_kind(objects, "ScaledObject"):
        assert set(each["spec"]) <= fields
        for trigger in each["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
            assert float(trigger["metadata"]["threshold"]) > 0
            # A job is named after the Service that was scraped.
            job = trigger["metadata"]["query"].partition('job="')[2].partition('"')[0]
            assert job == each["spec"]["scaleTargetRef"]["name"] == the(objects, "Service", job)["metadata"]["name"]


def test_certificates_are_signed_by_an_issuer_that_is_there() -> None:
    objects = rendered("mtls")
    issuers = {each["metadata"]["name"]: each for each in of_kind(objects, "Issuer")}
    specs = [each["spec"] for each in of_kind(objects, "Certificate")]
    secrets = {spec["secretName"] for spec in specs}
    assert len(secrets) == len(specs)
    fields = {"secretName", "duration", "renewBefore", "privateKey", "usages", "dnsNames", "issuerRef", "isCA"}
    for spec in specs:
        assert spec["issuerRef"]["kind"] == "Issuer"
        assert spec["issuerRef"]["name"] in issuers
        assert set(spec) <= fields | {"commonName"}
        assert bool(spec.get("isCA")) != bool(spec.get("dnsNames"))
        if "renewBefore" in spec:
            assert int(spec["renewBefore"].removesuffix("h")) < int(spec["duration"].removesuffix("h"))
    (by_ca,) = (each["spec"]["ca"]["secretName"] for each in issuers.values() if "ca" in each["spec"])
    assert by_ca in secrets
    for each in both("overlays/mtls"):
        (mounted,) = (volume["secret"] for volume in each.spec["volumes"] if "secret" in volume)
        assert mounted["secretName"] in secrets
        # Readable for the group that the kubelet gives the files, and for nobody else.
        assert mounted["defaultMode"] == 0o440
