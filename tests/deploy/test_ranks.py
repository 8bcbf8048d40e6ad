"""Models on several GPUs: what starts the ranks, on one machine and on several, fits the services and itself."""

from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import GROUP, Deployed, Manifest, composed, rendered, selects, the, torchrun_arguments

GPU = "nvidia.com/gpu"
SIZE = "OUTRIDER_TENSOR_PARALLEL_SIZE"
PARTING_S = 5
"""What rank 0 takes at most to end the workers, after its grace."""


def grouped() -> Deployed:
    return Deployed(rendered("tensor-parallel"), "verifier")


def alone() -> Deployed:
    """One pod of several GPUs."""
    return Deployed(composed("plaintext", "tensor-parallel"), "verifier")


def pods() -> dict[str, Any]:
    template = grouped().workload["spec"]["leaderWorkerTemplate"]
    return {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}


def only(template: Manifest) -> Any:
    (found,) = template["spec"]["containers"]
    return found


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_pods_of_a_group_are_what_the_api_server_would_take(role: str) -> None:
    template = pods()[role]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **template["metadata"]}}
    kubernetes_validate.validate({**whole, "spec": template["spec"]}, "1.37", strict=True)


def test_a_group_has_as_many_ranks_as_the_setting_says() -> None:
    groups, settings = grouped().workload["spec"], grouped().environment
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
    settings = alone().environment
    arguments = torchrun_arguments(alone().container, settings)
    assert arguments is not None
    assert (arguments.standalone, arguments.training_script) == (True, "verifier_service")
    assert arguments.nproc_per_node == settings[SIZE] == alone().container["resources"]["limits"][GPU]


def test_ranks_are_killed_only_after_the_first_has_drained() -> None:
    grace = float(grouped().environment["OUTRIDER_GRACE"])
    leader = pods()["leader"]
    sleep = int(only(leader)["lifecycle"]["preStop"]["exec"]["command"][1])
    for template, told_after in ((leader, sleep), (pods()["worker"], 0), (alone().pod, sleep)):
        arguments = torchrun_arguments(only(template), {SIZE: "2", **GROUP})
        assert arguments is not None
        # The first hears of it after its preStop; the others have to be there until it has ended.
        assert arguments.shutdown_timeout > grace + PARTING_S + (sleep - told_after)
        assert told_after + arguments.shutdown_timeout < template["spec"]["terminationGracePeriodSeconds"]


def test_workers_differ_from_rank_0_by_what_serves() -> None:
    leader, worker = pods()["leader"]["spec"], pods()["worker"]["spec"]
    assert {name for name in leader if leader[name] != worker.get(name)} == {"containers"}
    serving, other = only(pods()["leader"]), only(pods()["worker"])
    served = {"name", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert {name for name in serving if serving[name] != other.get(name)} == served


def test_ranks_reach_each_other_and_nobody_else_does() -> None:
    objects = rendered("tensor-parallel")
    leader, worker = (template["metadata"]["labels"] for template in pods().values())
    draft = Deployed(objects, "draft").labels
    service = the(objects, "Service", "outrider-verifier")["spec"]
    assert selects({"matchLabels": service["selector"]}, leader)
    assert not selects({"matchLabels": service["selector"]}, worker)
    policy = the(objects, "NetworkPolicy", "outrider-verifier-ranks")["spec"]
    ((port,),) = ({each.master_port} for each in [torchrun_arguments(only(pods()["worker"]), GROUP)] if each)
    for way, peers in (("ingress", "from"), ("egress", "to")):
        (rule,) = policy[way]
        ((peer,), (ports,)) = rule[peers], rule["ports"]
        for selector in (policy["podSelector"], peer["podSelector"]):
            assert [selects(selector, labels) for labels in (leader, worker, draft)] == [True, True, False]
        assert ports["port"] <= port <= ports["endPort"]
