"""Where a model runs: a Python that leaves it as it is, the device of a name, and the device that a thread works on."""

import importlib.metadata

import torch

from outrider.runtime.errors import CheckpointError


def check_environment() -> None:
    """Checks that transformers sees no optional package `kernels`: it would swap parts of models for downloaded ones.

    Our folder bears that name. It passes for absent, as transformers goes by the version of a package's distribution.

    Raises:
        CheckpointError: a foreign distribution of that name is installed, or transformers takes ours for it.
    """
    for found in importlib.metadata.distributions(name="kernels"):
        raise CheckpointError(
            f"the distribution 'kernels' {found.version} is installed and would stand in for our package of that name: "
            "remove it (pip uninstall kernels)"
        )
    from transformers.utils import import_utils  # heavy, and not needed to see the first case

    if import_utils.is_kernels_available():
        raise CheckpointError(
            "transformers takes our package 'kernels' for its optional one: our version lies in the range it accepts"
        )


def find_device(name: str) -> torch.device:
    """The device of a name: `auto` (CUDA where there is one), `cpu`, `cuda` (the first) or `cuda:i`. One of CUDA has
    its number, counted among those that `CUDA_VISIBLE_DEVICES` lets through.

    Raises:
        CheckpointError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CheckpointError(f"--device must be auto, cpu, cuda or cuda:i, not '{name}'") from error
    if device.type not in ("cpu", "cuda"):
        raise CheckpointError(f"--device must be auto, cpu, cuda or cuda:i, not '{name}'")
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise CheckpointError(f"--device {name} is not there: torch sees {count} CUDA devices")
    return torch.device("cuda", index)


def work_on(device: torch.device) -> None:
    """Makes a CUDA device the current one of this thread, for whatever asks for that and not for its operands' own:
    each thread begins with the first device. Does nothing for others.

    Products in 16 bits then add up in float32 throughout. By default parts of a sum meet in bfloat16, so that the same
    row differs from pass to pass by more than its rounding.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def is_lost(device: torch.device) -> bool:
    """Whether a device has failed for good: after some CUDA errors every later call of the process raises, too."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def describe_device(device: torch.device) -> dict[str, str]:
    """What tells a device from others in a log, beside its name to torch: the model and the UUID of a GPU, as
    `nvidia-smi -L` shows them; of a CPU nothing.
    """
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {"gpu": found.name, "gpu_uuid": f"GPU-{found.uuid}"}
