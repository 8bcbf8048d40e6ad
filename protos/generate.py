"""Generates the Python code beside the `.proto` files: `python -m protos.generate [--out DIR]`.

The proto root is this folder, so that descriptors are named `outrider/v1/…` as in any other language; the generated
imports are then rewritten to the package where the files really lie, `protos.outrider.v1`.
"""

import argparse
import re
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent
_IMPORT = re.compile(r"^(from|import) outrider\.v1", re.MULTILINE)
_DOTTED = re.compile(r"(?<![\w.])outrider\.v1\.(\w+_pb2)")


def generate(out: Path) -> list[Path]:
    """Writes the messages, services and their type stubs for every `.proto` file to `out/outrider/v1`.

    Raises:
        RuntimeError: protoc refused the files.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("outrider/v1/*.proto"))
    services = [source for source in sources if source.endswith("_service.proto")]
    roots = ["protoc", f"--proto_path={ROOT}", f"--proto_path={files('grpc_tools') / '_proto'}"]
    # By its full path: protoc searches PATH alone, which an environment that is not activated is not on.
    plugin = Path(sysconfig.get_path("scripts"), "protoc-gen-mypy_grpc")
    out.mkdir(parents=True, exist_ok=True)
    for arguments in (
        [*roots, f"--python_out={out}", f"--pyi_out={out}", *sources],
        [
            *roots,
            f"--plugin={plugin}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet:{out}",
            *services,
        ],
    ):
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc failed")
    written = sorted(path for path in (out / "outrider" / "v1").iterdir() if "_pb2" in path.name)
    for path in written:
        path.write_text(_rewrite_imports(path.read_text()))
    return written


def _rewrite_imports(source: str) -> str:
    source = _IMPORT.sub(r"\1 protos.outrider.v1", source)
    return _DOTTED.sub(r"protos.outrider.v1.\1", source)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="folder to write to (default: beside the .proto files)")
    for path in generate(parser.parse_args().out):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
