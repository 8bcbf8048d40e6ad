"""constraints.txt names one version of everything an extra brings, and those versions agree with each other."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.project.tree import ROOT, brought_by, closure, every_extra, requirements

ONLY_ON_CUDA = ("nvidia-", "cuda-")
"""A CUDA build of torch pins these exactly by itself; the constraints leave them out."""


def _pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    stated = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in stated}


def _version(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    return Version(specifier.version)


def _installed_extras() -> list[str]:
    """All but `llama`, which `make test` leaves out: it builds for minutes."""
    return [extra for extra in every_extra() if extra != "llama"]


def test_every_line_pins_one_public_version() -> None:
    for name, pin in _pins().items():
        assert [s.operator for s in pin.specifier] == ["=="], f"{name} is not pinned exactly: {pin}"
        assert _version(pin).local is None, f"{name} is pinned to the build of one index: {pin}"


@pytest.mark.parametrize("extra", ["", *every_extra()], ids=lambda extra: extra or "client")
def test_requirements_of_the_project_are_pinned_within_its_bounds(extra: str) -> None:
    pins = _pins()
    for requirement in requirements(*filter(None, [extra])):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{requirement} has no pin"
        assert _version(pins[name]) in requirement.specifier, f"{pins[name]} is outside {requirement}"


def test_all_dependencies_are_pinned() -> None:
    brought = {name for name in closure(requirements(*_installed_extras())) if not name.startswith(ONLY_ON_CUDA)}
    assert brought - _pins().keys() == set()


def test_pins_agree_with_each_other() -> None:
    pins = _pins()
    checked = 0
    for name in closure(requirements(*_installed_extras())) & pins.keys():
        if Version(metadata.version(name)).public != str(_version(pins[name])):
            continue  # the pinned version may have other requirements
        checked += 1
        for requirement in brought_by(name):
            wanted = canonicalize_name(requirement.name)
            assert wanted not in pins or _version(pins[wanted]) in requirement.specifier, (
                f"{name} asks for {requirement}, not {pins[wanted]}"
            )
    assert checked > 20, (
        f"only {checked} of {len(pins)} packages here have the pinned version: `make test` installs them"
    )
