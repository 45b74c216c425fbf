"""docs/api.md from the protocol's comments: `python proto/api_doc.py > docs/api.md` (`make proto` runs it)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PROTO = Path(__file__).parent
HEAD = """\
# The gRPC API, package {package}

Written from the comments of `proto/{file}` by `make proto`: change it there.

A field marked *optional* can be told apart from its zero value: unset means what its row says. Of fields that share a
name in the column *one of*, at most one is set.
"""

_SERVICE, _MESSAGE, _ENUM = 6, 4, 5
_FIELD, _ONEOF, _VALUE, _METHOD = 2, 8, 2, 2
"""Numbers of the fields that hold these, in descriptor.proto: comments are found by them."""


def read_protocol() -> FileDescriptorProto:
    """The protocol with its comments, as buf reads it; buf stands beside this Python."""
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "build", str(PROTO), "-o", "-#format=binpb", "--as-file-descriptor-set"]
    built = subprocess.run(command, capture_output=True, check=True)
    files = FileDescriptorSet.FromString(built.stdout).file
    return next(file for file in files if file.package == "gemray.v1")


class Comments:
    """The comments of a file by the place of what they stand before."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}

    def __call__(self, *path: int) -> str:
        """The comment, its lines joined to paragraphs."""
        paragraphs = self._by_path.get(path, "").strip().replace("<", "\\<").split("\n\n")
        return "\n\n".join(" ".join(line.strip() for line in paragraph.splitlines()) for paragraph in paragraphs)

    def cell(self, *path: int) -> str:
        """The comment for a table."""
        return self(*path).replace("\n\n", "<br>").replace("|", "\\|")


def comments_of_fields(file: FileDescriptorProto) -> dict[str, str]:
    """Comments by MESSAGE.field; of a field in a oneof with the oneof's, which holds for all of them."""
    comments, found = Comments(file), {}
    for m, message in enumerate(file.message_type):
        for f, field in enumerate(message.field):
            of_all = (
                f" {comments(_MESSAGE, m, _ONEOF, field.oneof_index)}"
                if field.HasField("oneof_index") and not field.proto3_optional
                else ""
            )
            found[f"{message.name}.{field.name}"] = comments(_MESSAGE, m, _FIELD, f) + of_all
    return found


def api_doc(file: FileDescriptorProto) -> str:
    """The whole document."""
    comments = Comments(file)
    parts = [HEAD.format(package=file.package, file=file.name)]
    for s, service in enumerate(file.service):
        parts += _service(comments, s, service)
    parts.append("## Messages\n")
    for m, message in enumerate(file.message_type):
        parts += _message(comments, m, message)
    parts.append("## Enumerations\n")
    for e, enum in enumerate(file.enum_type):
        parts += _enum(comments, e, enum)
    return "\n".join(parts)


def _service(comments: Comments, s: int, service: ServiceDescriptorProto) -> Iterator[str]:
    yield f"## Service {service.name}\n"
    yield f"{comments(_SERVICE, s)}\n"
    yield "| call | request | answer | |\n| --- | --- | --- | --- |"
    for m, method in enumerate(service.method):
        answer = f"stream of {_link(method.output_type)}" if method.server_streaming else _link(method.output_type)
        meaning = comments.cell(_SERVICE, s, _METHOD, m)
        yield f"| `{method.name}` | {_link(method.input_type)} | {answer} | {meaning} |"
    yield ""


def _message(comments: Comments, m: int, message: DescriptorProto) -> Iterator[str]:
    yield f"### {message.name}\n"
    if said := comments(_MESSAGE, m):
        yield f"{said}\n"
    if not message.field:
        yield "No fields.\n"
        return
    oneofs = any(f.HasField("oneof_index") and not f.proto3_optional for f in message.field)
    yield ("| field | type | one of | |\n" if oneofs else "| field | type | |\n") + "| --- " * (3 + oneofs) + "|"
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for f, field in enumerate(message.field):
        meaning = comments.cell(_MESSAGE, m, _FIELD, f)
        of = ""
        if oneofs:
            is_one = field.HasField("oneof_index") and not field.proto3_optional
            of = f" {message.oneof_decl[field.oneof_index].name if is_one else ''} |"
        yield f"| `{field.name}` | {_type(field, maps)} |{of} {meaning} |"
    yield ""
    told = ((name.name, comments(_MESSAGE, m, _ONEOF, o)) for o, name in enumerate(message.oneof_decl))
    for name, text in told:
        if text:
            yield f"`{name}`: {text}\n"


def _enum(comments: Comments, e: int, enum: EnumDescriptorProto) -> Iterator[str]:
    yield f"### {enum.name}\n"
    if said := comments(_ENUM, e):
        yield f"{said}\n"
    yield "| value | number | |\n| --- | --- | --- |"
    for v, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {comments.cell(_ENUM, e, _VALUE, v)} |"
    yield ""


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in maps:
        key, value = maps[name].field
        return f"map of {_plain(key)} to {_plain(value)}"
    label = "list of " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    return f"{label}{_plain(field)}" + (", *optional*" if field.proto3_optional else "")


def _plain(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(full_name: str) -> str:
    name = full_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


if __name__ == "__main__":
    sys.stdout.write(api_doc(read_protocol()))
