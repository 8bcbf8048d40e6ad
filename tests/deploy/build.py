"""Runs the steps of a Dockerfile where there is no container engine: each stage in a root of its own.

What differs from an engine: the base image is this machine (`tests.deploy.roots`), layers are folders, and a step that
asks for a package of the distribution cannot run, since the distribution is the machine's own.
"""

import fnmatch
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.deploy.dockerfile import Stage, Step, lineage, set_by
from tests.deploy.roots import Root

MadeBy = tuple[tuple[Step, ...], frozenset[tuple[str, str]]]
"""The steps of a target that make files or bear on those that do, and what they get in their environment."""

_MAKING = {"ENV", "WORKDIR", "USER", "COPY", "RUN"}

PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"


class Builder:
    """Builds stages of one Dockerfile, each once, and those that are made by the same steps together.

    Args:
        stages: as `dockerfile.read` gives them.
        context: the folder that COPY copies from.
        ignored: the patterns of what the context leaves out, as `.dockerignore` has them.
        roots: where the roots are made.
        cache: what is mounted where a step asks for a cache.
        env: what the steps of a target get in their environment beside what the file says.
        mounts: what each root holds beside what the steps put there.
        after: called with the root after each RUN, and with what ran.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        *,
        context: Path,
        ignored: list[str],
        roots: Path,
        cache: Path,
        env: Callable[[str], Mapping[str, str]] = lambda target: {},
        mounts: list[tuple[str, str, str]] | None = None,
        after: Callable[[Root, str], None] = lambda root, command: None,
    ) -> None:
        self._stages = stages
        self._context = context
        self._ignored = ignored
        self._roots = roots
        self._cache = cache
        self._env = env
        self._mounts = mounts or []
        self._after = after
        self._built: dict[MadeBy, Root] = {}

    def build(self, target: str) -> Root:
        """The root of a target, with all that it is made of."""
        made_by = self._made_by(target)
        if made_by in self._built:
            return self._built[made_by]
        path = self._roots / target
        path.mkdir()
        path.chmod(0o755)
        root = self._built[made_by] = Root(path, list(self._mounts))
        for name in ("/tmp", "/root"):
            root.inside(name).mkdir()
        folder, user, env = "/", "0", {"PATH": PATH, "HOME": "/root"}
        for stage in lineage(self._stages, target):
            for step in stage.steps:
                if step.name == "ENV":
                    env = set_by(step, env)
                elif step.name == "WORKDIR":
                    folder = step.text
                    root.inside(folder).mkdir(parents=True, exist_ok=True)
                elif step.name == "USER":
                    user = step.text.partition(":")[0]
                elif step.name == "COPY":
                    self._copy(root, step, folder)
                elif step.name == "RUN":
                    assert user == "0", f"{stage.name}: RUN as user {user} is not known here"
                    self._run(root, step, folder, {**env, **self._env(target)})
        return root

    def _made_by(self, target: str) -> MadeBy:
        """What its files follow from: targets that differ in what they run alone are the same root."""
        steps = (step for stage in lineage(self._stages, target) for step in stage.steps)
        return tuple(step for step in steps if step.name in _MAKING), frozenset(self._env(target).items())

    def _run(self, root: Root, step: Step, folder: str, env: Mapping[str, str]) -> None:
        more = []
        for text in step.flags().get("mount", []):
            what = dict(part.partition("=")[::2] for part in text.split(","))
            if what["type"] == "bind":
                more.append(("ro", str(self.build(what["from"]).inside(what["source"])), what["target"]))
            else:
                assert what["type"] == "cache", f"a mount of type {what['type']} is not known here"
                more.append(("rw", str(self._cache), what["target"]))
        root.run(["sh", "-c", f"cd {shlex.quote(folder)} && {step.rest()}"], env=env, more=more)
        self._after(root, step.rest())

    def _copy(self, root: Root, step: Step, folder: str) -> None:
        *sources, to = step.rest().split()
        target = root.inside(to if to.startswith("/") else f"{folder}/{to}")
        other = step.flags().get("from")
        for source in sources:
            origin = self.build(other[0]).inside(source) if other else self._context / source
            if not other:
                assert self.in_context(source), f"COPY {source}: the context leaves it out"
            into = target / origin.name if to.endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():
                # As Docker has it: of a folder, what is in it.
                shutil.copytree(
                    origin,
                    target,
                    symlinks=True,
                    dirs_exist_ok=True,
                    ignore=None if other else shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy2(origin, into)

    def in_context(self, path: str) -> bool:
        """Whether a path of the context is sent to the engine: the last pattern that fits decides."""
        kept = True
        for pattern in self._ignored:
            negated = pattern.startswith("!")
            bare = pattern.removeprefix("!")
            parents = [path, *(str(parent) for parent in Path(path).parents)]
            if any(fnmatch.fnmatchcase(each, bare) for each in parents):
                kept = negated
        return kept


def patterns(path: Path) -> list[str]:
    """The patterns of an ignore file."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def installed(root: Root, python: str) -> dict[str, str]:
    """The distributions that a Python of the root sees, with their versions."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    found: dict[str, str] = json.loads(root.run([python, "-P", "-c", code], env={"PATH": PATH}))
    return found
