"""The alert rules of the component `monitoring` are those of `deploy/alerts`."""

import importlib.util
from types import ModuleType

import yaml

from tests.deploy.manifests import DEPLOY


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rules", DEPLOY / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_component_has_the_rules_as_they_are_now() -> None:
    script = _script()
    source = script.SOURCE.read_text(encoding="utf-8")
    written = script.TARGET.read_text(encoding="utf-8")
    assert written == script.wrapped(source), "run: python deploy/rules.py"
    assert yaml.safe_load(written)["spec"] == yaml.safe_load(source)
