"""docs/api.md is what the protocol's comments say, and they say something of each call, field and value."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from api_doc import Comments, api_doc, read_protocol


@pytest.fixture(scope="module")
def protocol() -> FileDescriptorProto:
    return read_protocol()


def test_the_document_is_the_comments(protocol: FileDescriptorProto) -> None:
    written = Path(__file__).parents[2] / "docs" / "api.md"
    assert written.read_text(encoding="utf-8") == api_doc(protocol), "make proto writes it anew"


def test_every_message_and_enum_has_a_section(protocol: FileDescriptorProto) -> None:
    document = api_doc(protocol)
    names = [message.name for message in protocol.message_type] + [enum.name for enum in protocol.enum_type]
    assert [name for name in names if document.count(f"\n### {name}\n") != 1] == []
    calls = [method.name for service in protocol.service for method in service.method]
    assert [name for name in calls if f"| `{name}` |" not in document] == []


def test_marks_stay_text(protocol: FileDescriptorProto) -> None:
    comments = Comments(protocol)
    told = [comments(4, m, 2, f) for m, message in enumerate(protocol.message_type) for f in range(len(message.field))]
    assert any("\\<|channel>" in text for text in told), "a browser would take it for a tag"
    assert all(line.count(" | ") >= 2 for line in api_doc(protocol).splitlines() if line.startswith("| `"))
