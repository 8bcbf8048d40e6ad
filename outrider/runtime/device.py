"""The device a model runs on, and a check of the Python environment."""

import importlib.metadata

import torch

from outrider.rpc.tls import SettingsError
from outrider.runtime.errors import CheckpointError


class DeviceNotFound(CheckpointError, SettingsError):
    """No device of this machine has the name. A setting of the services; commands load models without any."""


def check_environment() -> None:
    """Checks that transformers sees no optional package `kernels`: it would replace parts of models by downloads.

    Our package has the same name. transformers looks for a distribution of that name; ours has another name.

    Raises:
        CheckpointError: a foreign distribution of that name is installed, or transformers mistakes ours for it.
    """
    for found in importlib.metadata.distributions(name="kernels"):
        raise CheckpointError(
            f"the distribution 'kernels' {found.version} is installed, and hides Outrider's package of the same name: "
            "remove it with pip uninstall kernels"
        )
    from transformers.utils import import_utils  # heavy, and not needed to see the first case

    if import_utils.is_kernels_available():
        raise CheckpointError(
            "transformers mistakes Outrider's package 'kernels' for an optional package of the same name; install a "
            "transformers release that pyproject.toml allows"
        )


def find_device(name: str) -> torch.device:
    """Return the device named `auto` (CUDA if available), `cpu`, `cuda` (the first) or `cuda:N`.

    CUDA devices are numbered among those that `CUDA_VISIBLE_DEVICES` allows.

    Raises:
        DeviceNotFound: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceNotFound(f"--device is '{name}'; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceNotFound(f"--device is '{name}'; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        found = f"{count} CUDA devices, numbered from 0" if count else "no CUDA device: use --device cpu, or auto"
        raise DeviceNotFound(f"--device is '{name}'; torch finds {found}")
    return torch.device("cuda", index)


def work_on(device: torch.device) -> None:
    """Makes a CUDA device the current one of this thread. Does nothing on a CPU.

    16-bit matrix products then accumulate in float32 throughout. By default partial sums are added in bfloat16, so that
    the same row would differ between batches by more than its rounding.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def is_lost(device: torch.device) -> bool:
    """Whether a device has failed for good: after some CUDA errors every later CUDA call of the process fails."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def describe_device(device: torch.device) -> dict[str, str]:
    """The model and UUID of a GPU for the log, as `nvidia-smi -L` shows them; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {"gpu": found.name, "gpu_uuid": f"GPU-{found.uuid}"}
