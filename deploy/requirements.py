"""Prints the requirements of the project with the named extras, one a line.

pip installs them after it has built the project itself. An image wants them in a layer of their own, and `make`
installs them while the C code compiles.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Reads `pyproject.toml` of the working folder."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][extra] for extra in sys.argv[1:]]
    print(*project["dependencies"], *(line for extra in extras for line in extra), sep="\n")


if __name__ == "__main__":
    main()
