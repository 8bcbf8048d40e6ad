"""A Dockerfile as its stages and their steps, with build arguments in their places.

It runs nothing.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_SUPPORTED = {"FROM", "ARG", "ENV", "WORKDIR", "RUN", "COPY", "USER", "EXPOSE", "ENTRYPOINT"}


class Step(NamedTuple):
    """One instruction: `RUN`, and what follows it."""

    name: str
    text: str

    def flags(self) -> dict[str, list[str]]:
        """What stands before the arguments as `--name=value`."""
        found: dict[str, list[str]] = {}
        for flag in re.match(r"((?:--\S+\s+)*)", self.text).group(1).split():  # type: ignore[union-attr]
            name, _, value = flag.removeprefix("--").partition("=")
            found.setdefault(name, []).append(value)
        return found

    def rest(self) -> str:
        """The arguments, without the flags."""
        return re.sub(r"^(?:--\S+\s+)*", "", self.text)


@dataclass
class Stage:
    """What stands between one FROM and the next.

    Attributes:
        base: a stage of the same file, or an image.
        steps: all but ARG, in order, with the values of arguments in them.
    """

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)


def read(path: Path, **arguments: str) -> dict[str, Stage]:
    """The stages by name, as `--build-arg NAME=VALUE` for each of `arguments` makes them.

    Raises:
        ValueError: an instruction is none that is known here.
    """
    shared: dict[str, str] = {}  # declared before the first FROM; a stage sees those that it declares itself
    local: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in _lines(path.read_text(encoding="utf-8")):
        name, _, text = line.partition(" ")
        name = name.upper()
        if name not in _SUPPORTED:
            raise ValueError(f"{path}: {name} is not known here")
        if name == "ARG":
            key, _, default = text.partition("=")
            scope = shared if stage is None else local
            scope[key] = arguments.get(key, default or shared.get(key, ""))
        elif name == "FROM":
            base, _, alias = _filled(text, shared).partition(" AS ")
            stage, local = Stage(alias.strip(), base.strip()), {}
            stages[stage.name] = stage
        else:
            assert stage is not None
            # A shell fills in what a RUN says, from what ARG and ENV have set.
            stage.steps.append(Step(name, text if name == "RUN" else _filled(text, local)))
    return stages


def lineage(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """The stages that a target consists of, its first base first."""
    found = []
    while target in stages:
        found.append(stages[target])
        target = stages[target].base
    return found[::-1]


def set_by(step: Step, before: Mapping[str, str]) -> dict[str, str]:
    """The environment behind an ENV instruction."""
    found = dict(before)
    for entry in shlex.split(_filled(step.text, before)):
        key, _, value = entry.partition("=")
        found[key] = value
    return found


def environment(stages: Mapping[str, Stage], target: str, before: Mapping[str, str]) -> dict[str, str]:
    """What a container of the target gets in its environment, on top of what its image has."""
    found = dict(before)
    for stage in lineage(stages, target):
        for step in stage.steps:
            if step.name == "ENV":
                found = set_by(step, found)
    return found


def last(stages: Mapping[str, Stage], target: str, name: str) -> str | None:
    """The text of the last such instruction of a target, which is the one that counts."""
    texts = [step.text for stage in lineage(stages, target) for step in stage.steps if step.name == name]
    return texts[-1] if texts else None


def entry_point(stages: Mapping[str, Stage], target: str) -> list[str]:
    """The command that a container of the target runs."""
    command: list[str] = json.loads(last(stages, target, "ENTRYPOINT") or "[]")
    return command


def _lines(text: str) -> list[str]:
    """Instructions, each on one line, without comments."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", kept).splitlines() if line.strip()]


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
