"""Builds the image where there is no container engine: the Dockerfile's own steps, each stage in a root of its own.

Unlike with an engine the base image is this machine (its `/usr` and `/etc`, read-only, and a Python of its own at
`/usr/local`), layers are folders, and no step can install a package of the distribution or ask an index: what pip
would download is linked in beforehand, and our own packages are built and installed for real. Roots are namespaces
that any user may make.
"""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.deploy.manifests import DEPLOY
from tests.machine import TOOLS, absent, need_networks, need_tools
from tests.project.tree import ROOT

DOCKERFILE = DEPLOY / "Dockerfile"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"

Mount = tuple[str, str, str]
"""Kind (`rw`, `ro` or `tmpfs`), from, to."""

# ------------------------------------------------------------------------------------------------------ the Dockerfile

_SUPPORTED = {"FROM", "ARG", "ENV", "WORKDIR", "RUN", "COPY", "USER", "EXPOSE", "ENTRYPOINT"}


class Step(NamedTuple):
    """One instruction: `RUN`, and its text."""

    name: str
    text: str

    def flags(self, name: str) -> list[str]:
        """The values of `--name=value` before the arguments."""
        flags = self.text.removesuffix(self.arguments()).split()
        return [flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}=")]

    def arguments(self) -> str:
        return re.sub(r"^(?:--\S+\s+)*", "", self.text)


@dataclass
class Stage:
    """A FROM and all steps that its target consists of, those of its bases first, without ARG.

    Attributes:
        bases: the stages below it, the nearest first, and the image at the bottom.
        steps: with the values of arguments filled in.
    """

    bases: list[str]
    steps: list[Step]

    def last(self, name: str) -> str:
        return next(step.text for step in reversed(self.steps) if step.name == name)

    def entry_point(self) -> Any:
        return json.loads(self.last("ENTRYPOINT"))

    def environment(self) -> dict[str, str]:
        """The environment of a container."""
        found = {"PATH": PATH}
        for step in self.steps:
            if step.name == "ENV":
                found |= _variables(step, found)
        return found


def stages(variant: str = "cpu") -> dict[str, Stage]:
    """The stages of our Dockerfile by name, as `--build-arg VARIANT=` makes them."""
    shared: dict[str, str] = {}  # declared before the first FROM; a stage sees those that it declares itself
    local: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    # Instructions, each on one line, without comments.
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    for line in filter(None, map(str.strip, re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines())):
        name, _, text = line.partition(" ")
        assert name in _SUPPORTED, f"{name} is not supported here"
        if name == "ARG":
            key, _, default = text.partition("=")
            scope = shared if stage is None else local
            scope[key] = variant if key == "VARIANT" else default or shared.get(key, "")
        elif name == "FROM":
            base, _, alias = map(str.strip, _filled(text, shared).partition(" AS "))
            below = found.get(base, Stage([], []))
            stage = found[alias] = Stage([base, *below.bases], [*below.steps])
            local = {}
        else:
            assert stage is not None
            # A shell fills in the variables of a RUN, which ARG and ENV have set.
            stage.steps.append(Step(name, text if name == "RUN" else _filled(text, local)))
    return found


def _variables(step: Step, before: Mapping[str, str]) -> dict[str, str]:
    entries = (entry.partition("=") for entry in shlex.split(_filled(step.text, before)))
    return {key: value for key, _, value in entries}


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def in_context(path: str) -> bool:
    """Say whether a path of the context is sent to the engine: the last pattern that fits decides."""
    kept = True
    parents = [path, *(str(parent) for parent in Path(path).parents)]
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines():
        if any(fnmatch.fnmatchcase(each, line.removeprefix("!")) for each in parents):
            kept = line.startswith("!")
    return kept


# --------------------------------------------------------------------------------------------------------------- roots

# Makes the mounts in its arguments, KIND FROM TO each, and enters the new root. `pivot_root` and not `chroot`: behind
# that one, no further user namespace may be made.
_ENTER = r"""
set -eu
root=$1; shift
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
    kind=$1; from=$2; to=$root$3; shift 3
    if [ -d "$from" ] || [ "$kind" = tmpfs ]; then
        mkdir -p "$to"
    elif [ ! -e "$to" ]; then
        mkdir -p "$(dirname "$to")"
        touch "$to"
    fi
    case $kind in
        rw) mount --rbind "$from" "$to" ;;
        ro) mount --rbind "$from" "$to"; mount -o remount,bind,ro "$to" ;;
        tmpfs) mount -t tmpfs -o mode=1777 tmpfs "$to" ;;
        overlay)
            layers="lowerdir=$from,upperdir=$root/.upper,workdir=$root/.work"
            # A layer that is written to belongs to one mount; those that are read can be shared.
            [ -z "$READ_ONLY" ] || layers="ro,lowerdir=$root/.upper:$from"
            mount -t overlay -o "userxattr,$layers" overlay "$to" ;;
    esac
done
shift
[ -z "$READ_ONLY" ] || mount -o remount,bind,ro "$root"
unset READ_ONLY
cd "$root"
pivot_root . .
umount -l .
cd /
exec "$@"
"""


@dataclass
class Root:
    """A folder that becomes `/`, with `mounts` in it."""

    path: Path
    mounts: Sequence[Mount]

    def inside(self, path: str) -> Path:
        """A path of the root, from outside."""
        return self.path / path.lstrip("/")

    def command(self, inner: Sequence[str], *, more: Sequence[Mount] = (), read_only: bool = False) -> list[str]:
        """A command that runs `inner` in here, as root of user and mount namespaces that it is started in."""
        for name in (".upper", ".work"):
            self.inside(name).mkdir(exist_ok=True)
        flat = [part for mount in (*_machine(), *self.mounts, *more) for part in mount]
        flag = f"READ_ONLY={'1' if read_only else ''}"
        return ["env", flag, "sh", "-c", _ENTER, "enter", str(self.path), *flat, "--", *inner]

    def run(self, inner: Sequence[str], *, env: Mapping[str, str], more: Sequence[Mount] = ()) -> str:
        """Run a command in here, as root of namespaces of its own, and return its output."""
        entering = self.command(["env", "-i", *(f"{key}={value}" for key, value in env.items()), *inner], more=more)
        unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        done = subprocess.run([*unshare, *entering], capture_output=True, text=True, check=False, env=TOOLS)
        assert done.returncode == 0, f"{inner}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


@cache
def _machine() -> tuple[Mount, ...]:
    """The machine's own folders in each root, all read-only but the overlay over Python."""
    links = [name for name in ("/bin", "/sbin", "/lib", "/lib64") if Path(name).exists()]
    kept = [("ro", name, name) for name in ("/usr", *links, "/etc")]
    devices = [("rw", name, name) for name in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")]
    # The installation, where this Python runs in an environment; its libraries may be looked for where it was built.
    python = str(Path(sys.base_prefix).resolve())
    at_home = () if python.startswith("/usr") else (("ro", python, python),)
    return (*kept, *at_home, ("overlay", python, "/usr/local"), ("rw", "/proc", "/proc"), *devices)


@cache
def need_namespaces() -> None:
    """Skip the test where users cannot make roots and networks on this machine."""
    need_networks()
    need_tools("pivot_root")
    python = Path(sys.base_prefix) / "bin" / "python"
    pip = [str(python), "-m", "pip", "--version"]
    if not python.exists() or subprocess.run(pip, capture_output=True, check=False).returncode != 0:
        absent(f"there is no pip beside {python}, as a base image has it")


# ------------------------------------------------------------------------------------------------------------ building

_SITE = f"/opt/outrider/lib/python{sysconfig.get_python_version()}/site-packages"


class Builder:
    """Builds stages of the CPU variant, each once, and those that consist of the same steps together."""

    def __init__(self, folder: Path) -> None:
        self.stages = stages()
        self._packages = Path(sysconfig.get_path("purelib"))
        self._roots, self._cache, self._tools = (folder / name for name in ("roots", "cache", "tools"))
        for each in (self._roots, self._cache, self._tools):
            each.mkdir()
        self._link("setuptools*", into=self._tools)
        self._built: dict[object, Root] = {}

    def build(self, target: str) -> Root:
        """Return the root of a target."""
        steps = [step for step in self.stages[target].steps if step.name not in ("EXPOSE", "ENTRYPOINT")]
        built_by = (tuple(steps), target == "package")
        if built_by in self._built:
            return self._built[built_by]
        path = self._roots / target
        path.mkdir()
        path.chmod(0o755)
        installed = [("ro", str(self._packages), "/installed"), ("ro", str(self._tools), "/tools")]
        root = self._built[built_by] = Root(path, installed)
        for name in ("/tmp", "/root"):
            root.inside(name).mkdir()
        # pip finds all that it has to install there already, in the right versions, and would fail if it did not.
        offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
        if target == "package":
            offline["PYTHONPATH"] = "/tools"
        folder, env = "/", {"PATH": PATH, "HOME": "/root"}
        for step in steps:
            match step.name:
                case "ENV":
                    env |= _variables(step, env)
                case "WORKDIR":
                    folder = step.text
                    root.inside(folder).mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(root, step, folder)
                case "RUN":
                    self._run(root, step, folder, env | offline)
        return root

    def _run(self, root: Root, step: Step, folder: str, env: Mapping[str, str]) -> None:
        if step.arguments().startswith("apt-get"):
            return  # the packages are this machine's
        more: list[Mount] = []
        for text in step.flags("mount"):
            mount = dict(part.partition("=")[::2] for part in text.split(","))
            if mount["type"] == "bind":
                more.append(("ro", str(self.build(mount["from"]).inside(mount["source"])), mount["target"]))
            else:
                assert mount["type"] == "cache", f"a mount of type {mount['type']} is not supported here"
                more.append(("rw", str(self._cache), mount["target"]))
        root.run(["sh", "-c", f"cd {shlex.quote(folder)} && {step.arguments()}"], env=env, more=more)
        if "-m venv" in step.text:
            self._link("*", into=root.inside(_SITE))

    def _link(self, pattern: str, *, into: Path) -> None:
        """Link the packages that are installed here, but for the project itself, which is to come from its wheel."""
        for entry in self._packages.glob(pattern):
            if not entry.name.startswith(("outrider", "__editable__")):
                (into / entry.name).symlink_to(f"/installed/{entry.name}")

    def _copy(self, root: Root, step: Step, folder: str) -> None:
        *sources, to = step.arguments().split()
        target = root.inside(to if to.startswith("/") else f"{folder}/{to}")
        other = step.flags("from")
        for source in sources:
            origin = self.build(other[0]).inside(source) if other else ROOT / source
            assert other or in_context(source), f"COPY {source}: the context leaves it out"
            into = target / origin.name if to.endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():  # as Docker has it: of a folder, its content
                ignore = None if other else shutil.ignore_patterns("__pycache__")
                shutil.copytree(origin, target, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                shutil.copy2(origin, into)
