"""The image as the Dockerfile makes it, built without a network: what pip would fetch is linked in beforehand.

The steps are the file's own. pip finds all that it is told to install there already, in the versions that it is told,
and would fail if it did not; what is ours it builds and installs for real.
"""

import sysconfig
from pathlib import Path

from tests.deploy.build import Builder, patterns
from tests.deploy.dockerfile import Stage, read
from tests.deploy.manifests import DEPLOY
from tests.deploy.roots import Root
from tests.project.tree import ROOT

DOCKERFILE = DEPLOY / "Dockerfile"

_SITE = "/opt/outrider/lib/python{version}/site-packages"


def stages(variant: str = "cpu") -> dict[str, Stage]:
    """Those of our Dockerfile."""
    return read(DOCKERFILE, VARIANT=variant)


def built_offline(folder: Path) -> Builder:
    """A builder of the CPU variant, in `folder`."""
    packages = Path(sysconfig.get_path("purelib"))
    tools, roots, cache = (folder / name for name in ("tools", "roots", "cache"))
    for each in (tools, roots, cache):
        each.mkdir()
    _link(packages, "setuptools*", into=tools)

    def linked(root: Root, command: str) -> None:
        if "-m venv" in command:
            _link(packages, "*", into=root.inside(_SITE.format(version=sysconfig.get_python_version())))

    def offline(target: str) -> dict[str, str]:
        how = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
        return how | {"PYTHONPATH": "/tools"} if target == "package" else how

    return Builder(
        stages(),
        context=ROOT,
        ignored=patterns(DEPLOY / "Dockerfile.dockerignore"),
        roots=roots,
        cache=cache,
        env=offline,
        mounts=[("ro", str(packages), "/installed"), ("ro", str(tools), "/tools")],
        after=linked,
    )


def _link(packages: Path, pattern: str, *, into: Path) -> None:
    """What is installed here, but for the project itself, which is to come from its wheel."""
    for entry in packages.glob(pattern):
        if not entry.name.startswith(("outrider", "__editable__")):
            (into / entry.name).symlink_to(f"/installed/{entry.name}")
