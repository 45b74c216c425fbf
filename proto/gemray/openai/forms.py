"""The form that a request asks of its answer: OpenAI's response_format, and what vLLM has beside it."""

from __future__ import annotations

import json
from typing import Any

from gemray.openai.errors import bad_field
from gemray.openai.fields import Fields, check_text
from gemray.v1 import generation_pb2 as pb


def read_form(fields: Fields) -> pb.Structured | None:
    """What the answer must follow; None for free text. Raises HttpError."""
    asked = fields.object("response_format")
    form = None if asked is None else _read_response_format(asked)
    more = fields.object("structured_outputs")
    if more is None:
        return form
    if form is not None:
        raise fields.refusal("structured_outputs", "unset beside response_format")
    return _read_structured_outputs(more)


def _read_response_format(fields: Fields) -> pb.Structured | None:
    fields.required("type")
    kind = fields.text("type", among=("text", "json_object", "json_schema"))
    described = fields.object("json_schema")
    fields.end()
    if kind == "json_object":
        return pb.Structured(json_object=True)
    if kind != "json_schema":
        return None
    if described is None:
        raise fields.refusal("json_schema", "an object with a schema")
    schema = described.required("schema")
    described.end(without_effect=("name", "description", "strict"))
    return pb.Structured(json_schema=_schema_text(described.name_of("schema"), schema))


def _schema_text(param: str, schema: Any) -> str:
    if not isinstance(schema, dict | bool):
        raise bad_field(param, schema, "a JSON schema")
    return check_text(param, json.dumps(schema, ensure_ascii=False))


def _read_structured_outputs(fields: Fields) -> pb.Structured:
    regex, grammar, choice = fields.text("regex"), fields.text("grammar"), fields.array("choice")
    if sum(form is not None for form in (regex, grammar, choice)) != 1:
        raise bad_field("structured_outputs", fields.names, "one of regex, choice, grammar; response_format has JSON")
    fields.end()
    if choice is None:
        return pb.Structured(regex=regex) if regex is not None else pb.Structured(lark=grammar)
    param = fields.name_of("choice")
    for index, text in enumerate(choice):
        if not isinstance(text, str):
            raise bad_field(f"{param}[{index}]", text, "a string")
        check_text(f"{param}[{index}]", text)
    return pb.Structured(choice=pb.Choices(texts=choice))
