"""Counting the fields of a request before it is built."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server import wire
from gemray_cluster.server.wire import Unreadable, count_fields, read_message
from gemray_workers.errors import InvalidField

TEXT = st.text(st.characters(codec="utf-8"), max_size=300)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@settings(max_examples=200)
@given(contents=st.lists(TEXT, max_size=10), bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats()), stops=IDS)
def test_counts_what_a_message_holds(contents: list[str], bias: dict[int, float], stops: list[int]) -> None:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=content) for content in contents]),
        sampling=pb.SamplingParameters(logit_bias=bias, stop_token_ids=stops, temperature=0.5, seed=2**64 - 1),
    )
    inside = sum(1 + bool(content) + 1 for content in contents)
    assert count_fields(request.SerializeToString(), request.DESCRIPTOR) == (
        2 + inside + len(bias) + bool(stops) + 2  # chat and sampling; messages; one a map entry; a packed list; scalars
    )


@settings(max_examples=300)
@given(data=st.binary(max_size=60))
def test_bytes_that_protobuf_reads_are_counted(data: bytes) -> None:
    """Only groups, which no proto3 writer makes, are refused though protobuf would skip them."""
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        return
    try:
        count = count_fields(data, pb.GenerateRequest.DESCRIPTOR)
    except DecodeError as error:
        why = str(error)
    else:
        why, limit = "", len(data) // 2
        assert 0 <= count <= limit
    assert not why or "wire type" in why or "does not end" in why


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    request = read_message(data, pb.GenerateRequest)
    assert isinstance(request, pb.GenerateRequest | Unreadable)


@pytest.mark.parametrize(("name", "most"), [("MAX_FIELDS", 1001), ("MAX_MESSAGES", 1001)])
def test_the_limit_is_the_last_that_passes(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(wire, name, most)
    monkeypatch.setattr(wire, "LEAST_FIELD_BYTES", 0)
    chat = pb.Chat(messages=[pb.ChatMessage()] * 1000)
    assert isinstance(
        read_message(pb.GenerateRequest(chat=chat).SerializeToString(), pb.GenerateRequest), pb.GenerateRequest
    )
    chat.messages.add()
    refused = read_message(pb.GenerateRequest(chat=chat).SerializeToString(), pb.GenerateRequest)
    assert isinstance(refused, Unreadable)
    assert isinstance(refused.error, InvalidField)


def test_a_bias_for_each_id_of_the_largest_vocabulary_passes() -> None:
    sampling = pb.SamplingParameters(logit_bias=dict.fromkeys(range(262_144), 1.0))
    data = pb.GenerateRequest(text="Hi", sampling=sampling).SerializeToString()
    assert count_fields(data, pb.GenerateRequest.DESCRIPTOR) == 262_146
    assert isinstance(read_message(data, pb.GenerateRequest), pb.GenerateRequest)
