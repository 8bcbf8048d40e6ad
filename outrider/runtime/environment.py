"""Checks that this Python can run our models as we mean them to run. Knows nothing of models.

transformers looks for an optional package named `kernels` and, where it finds one, swaps parts of the models for
downloaded ones. Our folder `kernels` bears that name. transformers tells packages apart by the version of the
distribution they come from, so ours passes for absent; a foreign one beside it would be taken for real.
"""

import importlib.metadata

_NAME = "kernels"


class ForeignKernelsError(RuntimeError):
    """transformers would take some `kernels` package for its own optional one."""


def check_environment() -> None:
    """Checks that transformers sees no optional package `kernels`.

    Raises:
        ForeignKernelsError: a foreign distribution of that name is installed, or transformers takes ours for it.
    """
    try:
        found = importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise ForeignKernelsError(
            f"the distribution '{_NAME}' {found} is installed and would stand in for our package of that name: "
            f"remove it (pip uninstall {_NAME})"
        )
    from transformers.utils.import_utils import is_kernels_available  # heavy, and not needed to see the first case

    if is_kernels_available():
        raise ForeignKernelsError(
            f"transformers takes our package '{_NAME}' for its optional one: our version lies in the range it accepts"
        )
