"""Root filesystems of our own, in namespaces that any user may make.

A root has the machine's `/usr` and `/etc`, read-only, in the place of a base image's, and a Python of its own at
`/usr/local`, as the image `python` has it. All else is empty, until somebody puts it there.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.machine import TOOLS, absent, need_networks, need_tools

# Mounts what its arguments say, KIND FROM TO each, and enters the new root. `pivot_root` and not `chroot`: from behind
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
    """A folder that becomes `/`.

    Attributes:
        path: where it lies outside.
        mounts: what else it holds: (`rw`, `ro` or `tmpfs`; from; to).
    """

    path: Path
    mounts: list[tuple[str, str, str]] = field(default_factory=list)

    def inside(self, path: str) -> Path:
        """Where a path of the root lies outside."""
        return self.path / path.lstrip("/")

    def command(
        self, inner: Sequence[str], *, more: Sequence[tuple[str, str, str]] = (), read_only: bool = False
    ) -> list[str]:
        """What runs `inner` in this root, as root of a user namespace that has been made already, in one of mounts."""
        for name in (".upper", ".work"):
            self.inside(name).mkdir(exist_ok=True)
        mounts = [*_machine(), *self.mounts, *more]
        flat = [part for mount in mounts for part in mount]
        flag = "1" if read_only else ""
        return ["env", f"READ_ONLY={flag}", "sh", "-c", _ENTER, "enter", str(self.path), *flat, "--", *inner]

    def run(
        self,
        inner: Sequence[str],
        *,
        env: Mapping[str, str],
        more: Sequence[tuple[str, str, str]] = (),
    ) -> str:
        """Runs a command in here, as root of a namespace of its own, and returns what it printed.

        Raises:
            AssertionError: it failed; the text has what it said.
        """
        entering = self.command(["env", "-i", *(f"{key}={value}" for key, value in env.items()), *inner], more=more)
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", *entering],
            capture_output=True,
            text=True,
            check=False,
            env=TOOLS,
        )
        assert done.returncode == 0, f"{inner}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


@cache
def _machine() -> tuple[tuple[str, str, str], ...]:
    """What each root shares with this machine, none of it to be written but the overlay over Python."""
    links = [name for name in ("/bin", "/sbin", "/lib", "/lib64") if Path(name).exists()]
    kept = [("ro", name, name) for name in ("/usr", *links, "/etc")]
    devices = [("rw", name, name) for name in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")]
    # The installation, where this Python runs in an environment; its libraries may be looked for where it was built.
    python = str(Path(sys.base_prefix).resolve())
    at_home = () if python.startswith("/usr") else (("ro", python, python),)
    return (*kept, *at_home, ("overlay", python, "/usr/local"), ("rw", "/proc", "/proc"), *devices)


@cache
def need_namespaces() -> None:
    """Skips the test where this machine lets nobody make roots and networks of their own."""
    need_networks()
    need_tools("pivot_root")
    python = Path(sys.base_prefix) / "bin" / "python"
    if (
        not python.exists()
        or subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0
    ):
        absent(f"there is no pip beside {python}, as a base image has it")
