"""Writes the pages of docs/reference that come from the code: `python docs/generate.py` (`make reference`).

settings.md comes from the settings of both services and from the options of `outrider`; contract.md from the comments
of the .proto files. It needs the extras `service` and `dev`. tests/docs/test_reference.py fails while a page is stale.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402
from annotated_types import Ge, Gt, Le  # noqa: E402
from google.protobuf.descriptor_pb2 import (  # noqa: E402
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from pydantic.fields import FieldInfo  # noqa: E402

from draft_service.settings import DraftSettings  # noqa: E402
from outrider.cli import main as outrider  # noqa: E402
from outrider.service.settings import ServiceSettings  # noqa: E402
from verifier_service.settings import VerifierSettings  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """The generated pages, by file name."""
    return {"settings.md": _settings_page(), "contract.md": _contract_page()}


def _table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


# ---------------------------------------------------------------------------------------------------------- settings

_SETTINGS = """# Settings

<!-- Generated from the code by docs/generate.py (`make reference`). Do not edit. -->

Each option of the services and of `outrider` is also a variable in the environment. A flag overrides its variable. A
value outside its range ends the program at its start, with one line and exit code 2. An integer of a service is at most
2147483647.

On or off: `--NAME` and `--no-NAME`; a variable takes `true` or `false`.
"""

_SHARED = """## Both services

Options of `python -m verifier_service` and of `python -m draft_service`. PEM and token files are read again when they
change. Items of a list are separated by commas, or given by several flags.
"""


_OUTRIDER = """
## `outrider`

`outrider COMMAND --help` prints the same. The variable of `outrider generate --draft` is `OUTRIDER_GENERATE_DRAFT`, and
so on.
"""


_OTHERS = """
## Variables of libraries

| variable | read by | meaning |
| --- | --- | --- |
| `OMP_NUM_THREADS` | torch | CPU threads of a model without `--threads` |
| `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` | Hugging Face Hub | folder; token; `1`: use the cache alone |
| `GRPC_VERBOSITY` | gRPC | its own log lines: `NONE` unless set, `error` for errors |
| `GRPC_EXPERIMENTS` | gRPC | how its core works; commands: `-event_engine_client` unless set (faster) |
| `OTEL_EXPORTER_OTLP_CERTIFICATE` | OpenTelemetry | CA (PEM) of an `https://` collector |
| `TRITON_INTERPRET` | Triton | `1`: run the Triton kernels on a CPU, slowly, for tests |
"""


def _settings_page() -> str:
    services = ((VerifierSettings, "Verifier service"), (DraftSettings, "Draft service"))
    own = {kind: [name for name in kind.model_fields if name in kind.__annotations__] for kind, _ in services}
    shared = [name for name in ServiceSettings.model_fields if not all(name in own[kind] for kind, _ in services)]
    sections = [_SETTINGS, _SHARED, _fields(ServiceSettings, shared)]
    for kind, title in services:
        program = kind.model_config["cli_prog_name"]
        sections += [f"\n## {title}\n\nFurther options of `{program}`.\n", _fields(kind, own[kind])]
    sections.append(_OUTRIDER)
    sections += _commands(outrider.commands)
    sections.append(_OTHERS.rstrip())
    return "\n".join(sections) + "\n"


def _fields(kind: type[ServiceSettings], names: Sequence[str]) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for name in names:
            field = kind.model_fields[name]
            meaning, _, default = (field.description or "").partition("; default: ")
            yield (
                f"`--{name.replace('_', '-')}`",
                f"`OUTRIDER_{name.upper()}`",
                _values(field),
                default or _default(field),
                _sentence(meaning),
            )

    return _table(("flag", "variable", "value", "default", "meaning"), rows())


def _sentence(text: str) -> str:
    first = text.partition(" ")[0]
    return (text if ":" in first else text[:1].upper() + text[1:]) + "."


_KINDS = {int: "integer", float: "number", str: "text", Path: "file", bool: "on or off"}


def _values(field: FieldInfo) -> str:
    """The values of a setting: a type and its range, or the choices."""
    parts = get_args(field.annotation)
    kind: Any = field.annotation
    if type(None) in parts:
        (kind,) = (part for part in parts if part is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is not None:  # Annotated
        kind = get_args(kind)[0]
    return _KINDS[kind] + _range(field.metadata)


def _range(metadata: Sequence[Any]) -> str:
    low = high = ""
    for bound in metadata:
        if isinstance(bound, Gt):
            low = f"above {bound.gt:g}"
        elif isinstance(bound, Ge):
            low = f"{bound.ge}"
        elif isinstance(bound, Le):
            high = f"{bound.le}"
    if low and high:
        return f", {low} to {high}"
    if low:
        return f", {low}" if low.startswith("above") else f", at least {low}"
    return f", at most {high}" if high else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


Row = tuple[str, str]


def _commands(commands: Mapping[str, click.Command]) -> Iterator[str]:
    """A section a command, then one for each set of several options that several commands share."""
    rows = {name: _options(name, command) for name, command in sorted(commands.items())}
    users_of: dict[Row, list[str]] = {}
    for name, options in rows.items():
        for row in options:
            users_of.setdefault(row, []).append(name)
    sets: dict[tuple[str, ...], list[Row]] = {}
    for row, users in users_of.items():
        sets.setdefault(tuple(users), []).append(row)
    shared = {group: options for group, options in sets.items() if len(group) > 1 < len(options)}
    apart = {row for options in shared.values() for row in options}
    for name, options in rows.items():
        links = [f"[{_listed(group)}](#options-of-{'-'.join(_joined(group))})" for group in shared if name in group]
        more = f"\n\nMore: options of {'; of '.join(links)}." if links else ""
        yield _command(name, commands[name], [row for row in options if row not in apart]) + more
    for group, options in shared.items():
        yield f"\n### Options of {_listed(group)}\n\n" + _table(("option", "meaning"), iter(options))


def _joined(names: Sequence[str]) -> list[str]:
    return [*names[:-1], "and", names[-1]]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(f'`{name}`' for name in names[:-1])} and `{names[-1]}`"


def _options(name: str, command: click.Command) -> list[Row]:
    with click.Context(outrider, info_name="outrider") as parent, click.Context(command, parent, name) as context:
        return [_option(each, context) for each in command.params if isinstance(each, click.Option)]


def _command(name: str, command: click.Command, options: Sequence[Row]) -> str:
    with click.Context(outrider, info_name="outrider") as parent, click.Context(command, parent, name) as context:
        usage = " ".join(command.collect_usage_pieces(context)).strip()
    parts = [f"\n### `outrider {name}`\n\n```text\noutrider {name} {usage}\n```\n"]
    parts += [_paragraph(text) for text in (command.help or "").split("\n\n")]
    return "\n".join([*parts, _table(("option", "meaning"), iter(options))])


def _paragraph(text: str) -> str:
    """One paragraph of a help text; click marks one of examples, a line each, with a backspace."""
    text = text.strip().replace("\\b", "\b")
    if text.startswith("\b"):
        return "```text\n" + "\n".join(line.strip() for line in text[1:].strip().splitlines()) + "\n```\n"
    return " ".join(text.split()) + "\n"


def _option(option: click.Option, context: click.Context) -> Row:
    names = " / ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
    if isinstance(option.type, click.Choice):
        names += " " + ", ".join(f"`{choice}`" for choice in option.type.choices)
    elif not option.is_flag:
        names += f" `{option.make_metavar(context).removesuffix(' RANGE')}`"
    meaning = (option.help or "").strip()
    if option.required:
        meaning += " Required."
    elif isinstance(option.default, str | Path | float | int) and option.default != "" and option.default is not False:
        default = f"{option.default:g}" if isinstance(option.default, float) else option.default
        meaning += f" Default: `{default}`."
    return names, meaning


# ---------------------------------------------------------------------------------------------------------- contract

_CONTRACT = """# Contract

<!-- Generated from the comments in protos/outrider/v1 by docs/generate.py (`make reference`). Do not edit. -->

The gRPC services and messages of the package `outrider.v1`. The numbers of fields are in `protos/outrider/v1`. Both
services answer gRPC reflection. Errors are gRPC statuses: see [errors](errors.md).
"""

_ORDER = ("draft_service", "verifier_service", "input", "speculation", "sampling", "model")
_PACKAGE = "outrider/v1"

# Numbers of the fields that paths in the source information are made of.
_SYNTAX, _MESSAGES, _ENUMS, _SERVICES = 12, 4, 5, 6
_FIELDS, _ONEOFS, _VALUES, _METHODS = 2, 8, 2, 2


def _contract_page() -> str:
    described = {file.name: file for file in _described().file}
    parts = [_CONTRACT]
    for name in _ORDER:
        file = described[f"{_PACKAGE}/{name}.proto"]
        comments = {tuple(each.path): _text(each.leading_comments) for each in file.source_code_info.location}
        parts.append(f"## `{name}.proto`\n\n{_head(file)}\n")
        for i, service in enumerate(file.service):
            parts.append(_service(service, comments, (_SERVICES, i)))
        for i, message in enumerate(file.message_type):
            parts.append(_message(message, comments, (_MESSAGES, i)))
        for i, enum in enumerate(file.enum_type):
            parts.append(_enum(enum, comments, (_ENUMS, i)))
    return "\n".join(parts)


def _described() -> FileDescriptorSet:
    """The contract with its comments, as protoc reads it.

    Raises:
        RuntimeError: protoc refused the files.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    protos = ROOT / "protos"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "contract.binpb")
        arguments = [
            "protoc",
            f"--proto_path={protos}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            *(str(path.relative_to(protos)) for path in sorted(protos.glob(f"{_PACKAGE}/*.proto"))),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc failed")
        return FileDescriptorSet.FromString(out.read_bytes())


Comments = Mapping[tuple[int, ...], str]


def _text(comment: str) -> str:
    return " ".join(comment.split())


def _head(file: FileDescriptorProto) -> str:
    (syntax,) = (each for each in file.source_code_info.location if tuple(each.path) == (_SYNTAX,))
    return _text(" ".join([*syntax.leading_detached_comments, syntax.leading_comments]))


def _service(service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for i, method in enumerate(service.method):
            request = ("stream of " if method.client_streaming else "") + _link(method.input_type)
            response = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            yield f"`{method.name}`", request, response, comments[(*path, _METHODS, i)]

    table = _table(("method", "request", "response", "meaning"), rows())
    return f"### `{service.name}`\n\n{comments[path]}\n\n{table}\n"


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> str:
    def rows() -> Iterator[Sequence[str]]:
        oneof = None
        for i, field in enumerate(message.field):
            inside = field.HasField("oneof_index") and not field.proto3_optional
            if inside and field.oneof_index != oneof:
                oneof = field.oneof_index
                yield f"one of `{message.oneof_decl[oneof].name}`", "", comments[(*path, _ONEOFS, oneof)]
            yield ("– " if inside else "") + f"`{field.name}`", _type(field), comments[(*path, _FIELDS, i)]

    head = f"### `{message.name}`\n\n{comments[path]}\n"
    return head + ("\n" + _table(("field", "type", "meaning"), rows()) + "\n" if message.field else "")


_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def _type(field: FieldDescriptorProto) -> str:
    name = _link(field.type_name) if field.type_name else _SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[`{name}`](#{name.lower()})" if type_name.startswith(".outrider.") else f"`{type_name[1:]}`"


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> str:
    rows = ((f"`{value.name}`", comments[(*path, _VALUES, i)]) for i, value in enumerate(enum.value))
    return f"### `{enum.name}`\n\n{comments[path]}\n\n{_table(('name', 'meaning'), rows)}\n"


def main() -> None:
    """Writes the pages."""
    for name, text in pages().items():
        path = REFERENCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stderr.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
