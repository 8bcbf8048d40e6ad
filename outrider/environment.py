"""The installed version, and environment variables that look like settings and are none."""

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version

# Kubernetes adds variables of this form for each service of a namespace: OUTRIDER_DRAFT_SERVICE_HOST.
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)|$)")
# "GAMA" is near to GAMMA, and "GAMMA", a setting of the draft service, is not near to MAX_GAMMA.
_CUTOFF = 0.75


def installed_version() -> str:
    """The version of Outrider; "unknown" in a source tree that is not installed."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "unknown"


def mistyped(known: Collection[str], prefix: str) -> dict[str, str]:
    """The variables that begin with `prefix` and are not in `known`, each with the known name nearest to it.

    A variable without a near name is left out: it may belong to another program.
    """
    found = {}
    for variable in sorted(os.environ):
        if variable.startswith(prefix) and variable not in known and not _OF_KUBERNETES.search(variable):
            names = {name.removeprefix(prefix): name for name in known}
            for nearest in get_close_matches(variable.removeprefix(prefix), names, n=1, cutoff=_CUTOFF):
                found[variable] = names[nearest]
    return found
