"""Other software imports the package by accident, so it must cost nothing to import."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_nothing_heavy() -> None:
    """While it is imported, transformers looks for an optional package named `kernels`, and finds this one."""
    code = "import sys, kernels; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
