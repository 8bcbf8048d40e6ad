"""The arguments of torchrun in a container that starts ranks."""

import argparse
from collections.abc import Mapping

from torch.distributed.run import get_args_parser

from tests.deploy.manifests import Manifest

_TORCHRUN = ["python", "-m", "torch.distributed.run"]

# What the LeaderWorkerSet controller puts into the environment of each pod, for the last pod of a group of two.
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "outrider-verifier-ranks-0.somewhere"}


def torchrun_arguments(container: Manifest, environment: Mapping[str, str]) -> argparse.Namespace | None:
    """Its arguments as torchrun reads them, variables put in; None of a container that does not run it."""
    command: list[str] = list(container.get("command", ()))
    if command[: len(_TORCHRUN)] != _TORCHRUN:
        return None
    words = command[len(_TORCHRUN) :]
    for name, value in environment.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words), f"a variable that nobody sets: {words}"
    return get_args_parser().parse_args(words)


def ranks_of_a_pod(container: Manifest, environment: Mapping[str, str]) -> int:
    """How many processes of a service run in it."""
    arguments = torchrun_arguments(container, {**GROUP, **environment})
    return 1 if arguments is None else int(arguments.nproc_per_node)
