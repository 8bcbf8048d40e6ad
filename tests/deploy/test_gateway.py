"""The gateway's manifests fit its command, the drafts that it calls, and its callers; so does the pool of drafts."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from outrider.cli.gateway import gateway_command
from outrider.cli.processes import Pair
from outrider.http.metrics import FrontMetrics
from tests.cluster import free_address, wait_until
from tests.deploy.manifests import Deployed, Manifest, of_kind, rendered, selects, the
from tests.operations.metrics_in_use import GIVEN, OPERATORS, Shown, expressions, query

OVERLAY, MTLS = "overlays/gateway", "mtls+gateway-mtls"
PREFIX = "OUTRIDER_GATEWAY"
CLIENT = {"outrider-client": "true"}

every = pytest.mark.parametrize(
    "gateway", [Deployed(OVERLAY, "gateway"), Deployed(MTLS, "gateway")], ids=[OVERLAY, MTLS]
)


def options(gateway: Deployed, folder: Path) -> Mapping[str, Any]:
    """The command's options as the pod's environment has them; its files are empty ones in `folder`."""
    given = {name: value for name, value in gateway.environment.items() if name.startswith(PREFIX)}
    for name, value in given.items():
        if value.startswith("/"):
            given[name] = str(folder / name)
            Path(given[name]).touch()
    assert gateway.container["command"] == ["outrider", gateway_command.name]
    with mock.patch.dict(os.environ, given):
        return gateway_command.make_context("gateway", [], auto_envvar_prefix=PREFIX).params


@every
def test_every_variable_is_an_option_that_takes_its_value(gateway: Deployed, tmp_path: Path) -> None:
    given = {name for name in gateway.environment if name.startswith("OUTRIDER_")}
    assert given <= {f"{PREFIX}_{option.name.upper()}" for option in gateway_command.params if option.name}
    found = options(gateway, tmp_path)
    assert found["http"] == f"0.0.0.0:{gateway.ports['http']}"
    assert found["http_key_file"] is not None
    encrypted = gateway.source == MTLS
    assert found["plaintext"] != encrypted
    assert all((found[name] is not None) == encrypted for name in ("tls_ca", "tls_cert", "tls_key", "tls_name"))


@every
def test_it_calls_drafts_and_they_admit_it(gateway: Deployed, tmp_path: Path) -> None:
    draft = Deployed(gateway.source, "draft")
    name, _, port = options(gateway, tmp_path)["draft"].rpartition(":")
    service = the(gateway.objects, "Service", name)["spec"]
    assert selects({"matchLabels": service["selector"]}, draft.labels)
    assert int(port) == draft.ports["grpc"]
    policy = the(gateway.objects, "NetworkPolicy", "outrider-draft")["spec"]
    assert any(selects(peer["podSelector"], gateway.labels) for rule in policy["ingress"] for peer in rule["from"])
    own = the(gateway.objects, "NetworkPolicy", gateway.name)["spec"]
    assert selects(own["podSelector"], gateway.labels)
    ((rule,), (out,)) = own["ingress"], own["egress"]
    assert [entry["port"] for entry in rule["ports"]] == [gateway.ports["http"]]
    assert {"podSelector": {"matchLabels": CLIENT}} in rule["from"]
    assert [entry["port"] for entry in out["ports"]] == [draft.ports["grpc"]]
    assert [selects(peer["podSelector"], draft.labels) for peer in out["to"]] == [True]


@every
def test_the_pod_has_no_privilege_and_reads_its_secrets(gateway: Deployed) -> None:
    spec, container = gateway.spec, gateway.container
    assert spec["securityContext"] == Deployed(gateway.source, "draft").spec["securityContext"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    the(gateway.objects, "ServiceAccount", spec["serviceAccountName"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    secrets = {each["name"]: each["secret"] for each in spec["volumes"] if "secret" in each}
    assert {each["defaultMode"] for each in secrets.values()} == {0o440}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in secrets}
    files = [value for name, value in gateway.environment.items() if name.startswith(PREFIX) and value.startswith("/")]
    assert {str(Path(file).parent) for file in files} == mounted
    certificates = {each["spec"]["secretName"] for each in of_kind(gateway.objects, "Certificate")}
    assert {each["secretName"] for each in secrets.values()} - certificates == {"outrider-gateway-keys"}


@every
def test_service_budget_and_scaler_find_the_pods(gateway: Deployed) -> None:
    service = the(gateway.objects, "Service", gateway.name)["spec"]
    budget = the(gateway.objects, "PodDisruptionBudget", gateway.name)["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for selector in (gateway.workload["spec"]["selector"], budget["selector"], {"matchLabels": service["selector"]}):
        pods = [Deployed(gateway.source, name) for name in ("draft", "verifier", "gateway")]
        assert [each.service for each in pods if selects(selector, each.labels)] == ["gateway"]
    assert {port["targetPort"] for port in service["ports"]} == set(gateway.ports)
    scaler = the(gateway.objects, "HorizontalPodAutoscaler", gateway.name)["spec"]
    assert scaler["scaleTargetRef"]["name"] == gateway.name
    assert "replicas" not in gateway.workload["spec"]


@every
def test_a_pod_has_time_for_answers_in_progress(gateway: Deployed) -> None:
    _, seconds = gateway.container["lifecycle"]["preStop"]["exec"]["command"]
    grace = int(gateway.environment["OUTRIDER_GATEWAY_HTTP_GRACE"])
    assert grace > 30
    assert gateway.spec["terminationGracePeriodSeconds"] > int(seconds) + grace
    assert gateway.container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_monitor_finds_its_metrics() -> None:
    objects = rendered("plaintext+gateway+monitoring")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    service = the(objects, "Service", "outrider-gateway")
    assert selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_dashboard_and_alerts_query_metrics_that_the_front_has() -> None:
    metrics = FrontMetrics(["/v1/completions"], shows_vllm=False)
    for status in (200, 500, 502, 503):
        metrics.request_ended("/v1/completions", status)
    shown = Shown()
    shown.read(metrics.show(None))
    seen = set()
    for title, expression in expressions(front=True):
        found, grouped = query(expression)
        assert OPERATORS.isdisjoint(label for _, matchers in found for label, _ in matchers), title
        for name, matchers in found:
            labels = shown.samples[name]
            for label, value in matchers:
                assert label in GIVEN or any(re.fullmatch(value, each) for each in labels[label]), (title, label, value)
            assert grouped <= {*labels, *GIVEN, "namespace"}, title
        seen.add(title)
    assert {"OutriderHttpRequestsFail", "HTTP requests by status"} <= seen


def test_the_route_leads_to_the_gateway() -> None:
    (route,) = of_kind(rendered("plaintext+gateway+http-route"), "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = the(rendered("plaintext+gateway+http-route"), "Service", backend["name"])["spec"]
    assert backend["port"] in {port["port"] for port in service["ports"] if port["name"] == "http"}


def test_a_pool_has_the_drafts_with_the_contract_and_the_metrics_that_routers_read() -> None:
    source = "plaintext+inference-pool"
    draft = Deployed(source, "draft")
    (pool,) = of_kind(rendered(source), "InferencePool")
    assert selects(pool["spec"]["selector"], draft.labels)
    assert not selects(pool["spec"]["selector"], Deployed(source, "verifier").labels)
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [draft.ports["grpc"]]
    assert (draft.settings.vllm_grpc, draft.settings.vllm_metrics) == (True, True)
    policy: Manifest = the(rendered(source), "NetworkPolicy", "outrider-endpoint-picker")
    assert selects(policy["spec"]["podSelector"], draft.labels)
    (rule,) = policy["spec"]["ingress"]
    assert [entry["port"] for entry in rule["ports"]] == [draft.ports["metrics"]]


def test_the_command_runs_with_the_pods_environment(demo_pair: Pair, tmp_path: Path) -> None:
    """On other ports, and without TLS to the drafts: as in the overlay."""
    gateway = Deployed(OVERLAY, "gateway")
    key, port = "a-key-of-sixteen-or-more-characters", free_address().rpartition(":")[2]
    (tmp_path / "keys").write_text(f"{key}\n", encoding="ascii")
    given = {name: value for name, value in gateway.environment.items() if name.startswith(PREFIX)}
    given[f"{PREFIX}_HTTP"] = given[f"{PREFIX}_HTTP"].replace(str(gateway.ports["http"]), port)
    given |= {f"{PREFIX}_DRAFT": demo_pair.address, f"{PREFIX}_HTTP_KEY_FILE": str(tmp_path / "keys")}
    command = [sys.executable, "-m", "outrider.cli", *gateway.container["command"][1:]]

    def answer(path: str, **headers: str) -> tuple[int, str]:
        try:
            with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=10) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, ""
        except URLError:
            return 0, ""

    log = (tmp_path / "log").open("w+", encoding="utf-8")
    with log, subprocess.Popen(command, env={**os.environ, **given}, stderr=log) as process:
        try:
            probe = gateway.container["readinessProbe"]["httpGet"]["path"]
            wait_until(lambda: process.poll() is not None or answer(probe)[0] == 200, what="a ready gateway")
            assert process.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
            assert answer("/v1/models")[0] == 401
            public = {"Host": "outrider.example.com", "Authorization": f"Bearer {key}"}
            status, text = answer("/v1/models", **public)
            assert (status, "target" in text) == (200, True)
            (scaler,) = of_kind(gateway.objects, "HorizontalPodAutoscaler")
            (metric,) = scaler["spec"]["metrics"]
            assert f"\n{metric['pods']['metric']['name']} " in answer("/metrics")[1], "also without a key"
        finally:
            process.terminate()
    assert process.returncode == 0
