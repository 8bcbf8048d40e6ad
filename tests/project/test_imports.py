"""A client's installation suffices for a client: the other packages of a service are blocked, and no import fails.

import-linter reads the source; these tests run it, so that `__init__` modules of parents and imports made at run time
count as well.
"""

import functools
import json
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.utils import canonicalize_name

from tests.project.tree import ROOT, closure, requirements

_BLOCK = """
import importlib, json, pkgutil, sys

class Blocked:
    names = frozenset(json.loads(sys.argv.pop(1)))

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{fullname} is not part of a client's installation", name=fullname)

sys.meta_path.insert(0, Blocked())
"""

_IMPORT_ALL = """
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""


@functools.cache
def _not_for_clients() -> list[str]:
    """Return the top-level modules here that no client installs, as far as metadata tells."""
    clients = closure(requirements()) | {"outrider"}
    owners = metadata.packages_distributions()
    return sorted(m for m, dists in owners.items() if clients.isdisjoint(map(canonicalize_name, dists)))


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _BLOCK + program, json.dumps(_not_for_clients()), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_the_block_holds_what_services_install() -> None:
    blocked = _not_for_clients()
    assert {"torch", "transformers", "numpy", "tokenizers", "safetensors", "structlog", "pydantic"} <= set(blocked)
    assert {"grpc", "google", "rich", "click"}.isdisjoint(blocked)
    assert "torch is not part of a client's installation" in _run("import torch").stderr


@pytest.mark.parametrize(
    "module", ["outrider", "outrider.client", "outrider.cli", "outrider.rpc", "outrider.theory", "protos.outrider"]
)
def test_clients_import_nothing_of_a_service(module: str) -> None:
    done = _run(_IMPORT_ALL if module != "outrider" else "import outrider", module)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        (("serve", "--target", "a", "--draft", "b"), "service"),
        (("check", "--target", "a"), "service"),
        (("convert", "a", "b.gguf"), "service,llama"),
    ],
)
def test_a_command_names_the_extras_that_it_needs(arguments: tuple[str, ...], extras: str) -> None:
    done = _run("from outrider.cli import main; main()", *arguments)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("outrider: this command needs ")
    assert line.endswith(f"which is not installed: pip install -e '.[{extras}]' in a clone of Outrider")
