"""Models on several GPUs: what starts the ranks, on one machine and on several, fits the services and itself."""

from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import Deployed, Manifest, composed, of_kind, rendered, selects, the
from tests.deploy.torchrun import GROUP, torchrun_arguments

GPU = "nvidia.com/gpu"
SIZE = "OUTRIDER_TENSOR_PARALLEL_SIZE"
PARTING_S = 5
"""What rank 0 takes at most to end the workers, after its grace."""

BESIDES_THE_KUBELET = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
"""What the container of rank 0 has, and that of a worker has not."""


def grouped() -> Deployed:
    return Deployed(rendered("tensor-parallel"), "verifier")


def alone() -> Deployed:
    """One pod of several GPUs."""
    return Deployed(composed("plaintext", "tensor-parallel"), "verifier")


def groups() -> Manifest:
    spec: Manifest = grouped().workload["spec"]
    return spec


def pods() -> dict[str, Any]:
    template = groups()["leaderWorkerTemplate"]
    return {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}


def only(template: Manifest) -> Any:
    (found,) = template["spec"]["containers"]
    return found


@pytest.mark.parametrize("release", ["1.27", "1.37"])
@pytest.mark.parametrize("role", ["leader", "worker"])
def test_pods_of_a_group_are_what_the_api_server_would_take(role: str, release: str) -> None:
    template = pods()[role]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **template["metadata"]}}
    kubernetes_validate.validate({**whole, "spec": template["spec"]}, release, strict=True)


def test_a_group_has_the_fields_of_its_kind() -> None:
    spec = groups()
    assert set(spec) == {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
    assert set(spec["leaderWorkerTemplate"]) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated", "ranks wait for each other: none is ready before all are there"


def test_a_group_has_as_many_ranks_as_the_setting_says() -> None:
    size = groups()["leaderWorkerTemplate"]["size"]
    settings = grouped().environment
    for template in pods().values():
        arguments = torchrun_arguments(only(template), settings | GROUP | {"LWS_GROUP_SIZE": str(size)})
        assert arguments is not None
        assert int(arguments.nnodes) == size
        assert arguments.node_rank == int(GROUP["LWS_WORKER_INDEX"])
        assert arguments.master_addr == GROUP["LWS_LEADER_ADDRESS"]
        assert (arguments.module, arguments.training_script) == (True, "verifier_service")
        ranks = int(arguments.nproc_per_node)
        assert ranks * size == int(settings[SIZE]) > 1
        assert only(template)["resources"]["limits"][GPU] == str(ranks)


def test_a_pod_of_several_gpus_has_as_many_ranks() -> None:
    settings = alone().environment
    arguments = torchrun_arguments(alone().container, settings)
    assert arguments is not None
    assert arguments.standalone
    assert arguments.nproc_per_node == settings[SIZE] == alone().container["resources"]["limits"][GPU]
    assert int(settings[SIZE]) > 1
    assert (arguments.module, arguments.training_script) == (True, "verifier_service")


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
    serving, worker_container = only(pods()["leader"]), only(pods()["worker"])
    assert {name for name in serving if serving[name] != worker_container.get(name)} == BESIDES_THE_KUBELET | {"name"}
    assert set(worker_container) <= set(serving)


def test_pods_of_a_group_are_as_those_of_the_base() -> None:
    ours, plain = pods()["leader"]["spec"], Deployed(rendered("cross-node"), "verifier").spec
    differing = {name for name in ours if ours[name] != plain.get(name)}
    assert differing == {"containers", "volumes"}
    mine, theirs = only(pods()["leader"]), plain["containers"][0]
    assert {name for name in mine if mine[name] != theirs.get(name)} == {"command", "envFrom"}
    volumes = [{volume["name"]: volume for volume in spec["volumes"]} for spec in (ours, plain)]
    assert {name for name in volumes[0] if volumes[0][name] != volumes[1][name]} == {"shm"}


def test_nobody_calls_a_worker() -> None:
    objects = rendered("tensor-parallel")
    labels = {role: template["metadata"]["labels"] for role, template in pods().items()}
    service = the(objects, "Service", "outrider-verifier")["spec"]
    assert selects({"matchLabels": service["selector"]}, labels["leader"])
    assert not selects({"matchLabels": service["selector"]}, labels["worker"])
    # The controller makes a Service of the group's name, which must not be ours.
    (group,) = of_kind(objects, "LeaderWorkerSet")
    assert group["metadata"]["name"] not in {each["metadata"]["name"] for each in of_kind(objects, "Service")}


def test_ranks_reach_each_other_and_nobody_else_does() -> None:
    objects = rendered("tensor-parallel")
    labels = [template["metadata"]["labels"] for template in pods().values()]
    (port,) = {
        arguments.master_port for each in pods().values() if (arguments := torchrun_arguments(only(each), GROUP))
    }
    policy = the(objects, "NetworkPolicy", "outrider-verifier-ranks")["spec"]
    assert all(selects(policy["podSelector"], each) for each in labels)
    assert not selects(policy["podSelector"], Deployed(objects, "draft").labels)
    for way, peers in (("ingress", "from"), ("egress", "to")):
        (rule,) = policy[way]
        (peer,) = rule[peers]
        assert set(peer) == {"podSelector"}
        assert all(selects(peer["podSelector"], each) for each in labels)
        assert not selects(peer["podSelector"], Deployed(objects, "draft").labels)
        (ports,) = rule["ports"]
        assert ports["port"] <= port <= ports["endPort"]
    # Workers are shut but for that, for names and for being scraped.
    others = [each for each in of_kind(objects, "NetworkPolicy") if each["spec"] != policy]
    assert {each["metadata"]["name"] for each in others if selects(each["spec"]["podSelector"], labels[1])} == {
        "outrider-common"
    }
