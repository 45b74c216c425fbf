"""Changes to a request, by its descriptors or its bytes; all follow from one random generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

TEXTS = (
    "", " ", "x", "\0", "\n" * 50, "<|turn>", "<turn|>", "<|tool_call>call:f{a:<|\"|>x<|\"|>}<tool_call|>",
    "<|channel>thought\n", "<channel|>", "<bos>", "<eos>", "👩\u200d👧", "é" * 40, "\u202e漢", "\ufeff", "\ufdd0",
    "𝕏" * 9, "%s%n{0}{{x}}", "{{ 7*7 }}{% for %}", "user", "tool", "assistant", "system", "get_weather", "c1", "{}",
    "[]", "null", "true", "-0", "1e999", '{"a": {"b": [1]}}', '{"type": "object"}', '{"$ref": "#"}', '{"enum": []}',
    '{"type": "string", "pattern": "(a+)+$"}', '{"type": "array", "minItems": 1000000}', '{"not": {}}', '"\\ud800"',
    '{"type": "string", "minLength": 4000000000}', '[{"name": "f", "parameters": {"$ref": "#/$defs/x"}}]',
    '{"anyOf": []}', "(a|b)*c{1,3}", "(((((((((", "[^", "a{99999999}", "(?=x)", "\\", "start: a\na: start",
    "start: /x/", "start:", "%ignore /a/", "start: <[106]>", "start: <[99999999]>",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    20,
    21,
    64,
    106,
    127,
    128,
    255,
    256,
    4095,
    4096,
    65535,
    1 << 20,
    (1 << 31) - 1,
    -(1 << 31),
)
FRACTIONS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e-9, 5e-324, 2.0, 99.9, 100.0, 1e6, 1e308, math.inf, -math.inf, math.nan)

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
MOST_ADDED = 40


def mutated(message: Message, random: Random) -> Message:
    """A copy with one to four changes."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        _change(_within(copy, random), random)
    return copy


def _within(message: Message, random: Random) -> Message:
    """The message itself or one in it."""
    inner: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inner += value if field.is_repeated else [value]
    return _within(random.choice(inner), random) if inner and random.random() < 0.7 else message


def _change(message: Message, random: Random) -> None:
    fields: Any = message.DESCRIPTOR.fields
    if not fields:
        return
    field: FieldDescriptor = random.choice(fields)
    if random.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries: Any = getattr(message, field.name)
        for _ in range(random.randint(1, 8)):
            entries[_scalar(field.message_type.fields[0], random)] = _scalar(field.message_type.fields[1], random)
    elif field.is_repeated:
        _change_list(message, field, random)
    elif field.message_type is not None:
        inner: Message = getattr(message, field.name)
        inner.SetInParent()
        _change(inner, random)
    else:
        setattr(message, field.name, _changed(getattr(message, field.name), field, random))


def _change_list(message: Message, field: FieldDescriptor, random: Random) -> None:
    values: Any = getattr(message, field.name)
    if len(values) and random.random() < 0.3:
        del values[random.randrange(len(values))]
    elif len(values) and random.random() < 0.3:
        values.extend([values[random.randrange(len(values))]] * random.choice((1, 2, MOST_ADDED)))
    elif field.message_type is not None:
        _change(values.add(), random)
    else:
        values.extend(_scalar(field, random) for _ in range(random.choice((1, 1, 2, MOST_ADDED))))


def _changed(value: Any, field: FieldDescriptor, random: Random) -> Any:
    """A value in place of another; half of the texts are near what was there."""
    if isinstance(value, str) and value and random.random() < 0.5:
        at, length = random.randrange(len(value)), random.choice((0, 1, 1, 5, 50))
        return value[:at] + random.choice(TEXTS) * random.choice((0, 1, 1, 2)) + value[at + length :]
    return _scalar(field, random)


def _scalar(field: FieldDescriptor, random: Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = random.choice(TEXTS) * random.choice((1, 1, 1, 3, 60))
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice(FRACTIONS)
    least, most = _BITS[field.cpp_type]
    number = random.choice(NUMBERS) if random.random() < 0.8 else random.randint(least, most)
    return min(max(number, least), most)


def mutated_bytes(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """The bytes of a request, damaged: bits flipped, parts cut, doubled, or taken from another one."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randint(0, len(changed))
        match random.randrange(5):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << random.randrange(8)
            case 1:
                del changed[at : at + random.choice((1, 2, 8, 64, 1 << 20))]
            case 2:
                changed[at:at] = random.randbytes(random.choice((1, 2, 8, 64)))
            case 3:
                changed[at:at] = changed[: random.randint(0, len(changed))]
            case _:
                other = random.choice(others)
                start = random.randint(0, len(other))
                changed[at:at] = other[start : start + random.randint(0, 64)]
    return bytes(changed)
