"""Interprets Triton's kernels where there is no GPU."""

from tests.kernels.interpreter import patch_once_a_launch
from tests.kernels.paths import IS_INTERPRETED

if IS_INTERPRETED:
    patch_once_a_launch()
