"""Models on several GPUs: the manifests start as many ranks as the settings say, on one machine and on several."""

from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import GROUP, Deployed, Manifest, selects, the, torchrun_arguments

GPU = "nvidia.com/gpu"
SIZE = "OUTRIDER_TENSOR_PARALLEL_SIZE"
GROUPED = Deployed("overlays/tensor-parallel", "verifier")
SINGLE_POD = Deployed("plaintext+tensor-parallel", "verifier")
END_WORKERS_S = 5
"""Rank 0 takes at most so long to end the workers, after its grace."""


def pods() -> dict[str, Any]:
    template = GROUPED.workload["spec"]["leaderWorkerTemplate"]
    return {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}


def only(template: Manifest) -> Any:
    (found,) = template["spec"]["containers"]
    return found


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_the_api_server_would_accept_the_pods_of_a_group(role: str) -> None:
    template = pods()[role]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **template["metadata"]}}
    kubernetes_validate.validate({**whole, "spec": template["spec"]}, "1.37", strict=True)


def test_a_group_has_as_many_ranks_as_the_setting_says() -> None:
    groups, settings = GROUPED.workload["spec"], GROUPED.environment
    assert groups["startupPolicy"] == "LeaderCreated", "ranks wait for each other: none is ready before all are there"
    size = groups["leaderWorkerTemplate"]["size"]
    for template in pods().values():
        arguments = torchrun_arguments(only(template), settings | GROUP | {"LWS_GROUP_SIZE": str(size)})
        assert arguments is not None
        assert (int(arguments.nnodes), arguments.training_script) == (size, "verifier_service")
        assert (arguments.node_rank, arguments.master_addr) == (1, GROUP["LWS_LEADER_ADDRESS"])
        ranks = int(arguments.nproc_per_node)
        assert ranks * size == int(settings[SIZE]) > 1
        assert only(template)["resources"]["limits"][GPU] == str(ranks)


def test_a_pod_of_several_gpus_has_as_many_ranks() -> None:
    arguments = torchrun_arguments(SINGLE_POD.container, SINGLE_POD.environment)
    assert arguments is not None
    assert (arguments.standalone, arguments.training_script) == (True, "verifier_service")
    gpus = SINGLE_POD.container["resources"]["limits"][GPU]
    assert arguments.nproc_per_node == SINGLE_POD.environment[SIZE] == gpus


def test_ranks_are_killed_only_after_the_first_has_drained() -> None:
    grace = float(GROUPED.environment["OUTRIDER_GRACE"])
    leader = pods()["leader"]
    sleep = int(only(leader)["lifecycle"]["preStop"]["exec"]["command"][1])
    for template, signalled_after in ((leader, sleep), (pods()["worker"], 0), (SINGLE_POD.pod, sleep)):
        arguments = torchrun_arguments(only(template), {SIZE: "2", **GROUP})
        assert arguments is not None
        # Rank 0 gets its signal after its preStop; the others have to live until it has ended.
        assert arguments.shutdown_timeout > grace + END_WORKERS_S + (sleep - signalled_after)
        assert signalled_after + arguments.shutdown_timeout < template["spec"]["terminationGracePeriodSeconds"]


def test_only_rank_0_serves() -> None:
    leader, worker = pods()["leader"]["spec"], pods()["worker"]["spec"]
    assert {name for name in leader if leader[name] != worker.get(name)} == {"containers", "topologySpreadConstraints"}
    serving, other = only(pods()["leader"]), only(pods()["worker"])
    served = {"name", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert {name for name in serving if serving[name] != other.get(name)} == served


def test_budget_counts_all_ranks_and_first_ones_are_spread() -> None:
    budget = the(GROUPED.objects, "PodDisruptionBudget", "outrider-verifier")["spec"]
    (spread,) = pods()["leader"]["spec"]["topologySpreadConstraints"]
    labels = [template["metadata"]["labels"] for template in pods().values()]
    assert [selects(budget["selector"], each) for each in labels] == [True, True]
    assert [selects(spread["labelSelector"], each) for each in labels] == [True, False]


def test_only_ranks_reach_each_other() -> None:
    leader, worker = (template["metadata"]["labels"] for template in pods().values())
    draft = Deployed(GROUPED.source, "draft").labels
    service = {"matchLabels": the(GROUPED.objects, "Service", "outrider-verifier")["spec"]["selector"]}
    assert [selects(service, labels) for labels in (leader, worker)] == [True, False]
    policy = the(GROUPED.objects, "NetworkPolicy", "outrider-verifier-ranks")["spec"]
    arguments = torchrun_arguments(only(pods()["worker"]), GROUP)
    assert arguments is not None
    for way, peers in (("ingress", "from"), ("egress", "to")):
        (rule,) = policy[way]
        ((peer,), (ports,)) = rule[peers], rule["ports"]
        for selector in (policy["podSelector"], peer["podSelector"]):
            assert [selects(selector, labels) for labels in (leader, worker, draft)] == [True, True, False]
        assert ports["port"] <= arguments.master_port <= ports["endPort"]
