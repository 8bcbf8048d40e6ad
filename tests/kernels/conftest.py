"""What the tests of kernels run under, beside what all do."""

from tests.kernels.interpreter import patch_once_a_launch
from tests.kernels.paths import IS_INTERPRETED

if IS_INTERPRETED:
    patch_once_a_launch()
