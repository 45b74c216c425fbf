"""The form that a request asks of its answer: every size is checked before anything is built from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.json_input import read_json
from gemray_cluster.text.control_tokens import CHANNEL_TOKENS
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.compiler import MAX_GRAMMAR_BYTES
from gemray_workers.grammar.grammar import Grammar, Thought


def read_structured(
    structured: pb.Structured, *, thinks: bool, prompt_ids: Sequence[int], control_ids: Mapping[str, int]
) -> Grammar:
    """The grammar, not compiled yet; raises InvalidField.

    Args:
        structured: of the request.
        thinks: whether the request's chat asks for a thought.
        prompt_ids: a template may leave a thought open at their end.
        control_ids: of the tokenizer.
    """
    asked = structured.thought_first if structured.HasField("thought_first") else None
    thought = thought_before(asked, thinks=thinks, prompt_ids=prompt_ids, control_ids=control_ids)
    match structured.WhichOneof("form"):
        case "json_schema":
            grammar = Grammar(kind="json_schema", text=structured.json_schema, thought=thought)
        case "json_object":
            if not structured.json_object:
                raise InvalidField("structured.json_object", False, "true; leave `structured` out for free text")
            return Grammar(kind="json_object", text="", thought=thought)
        case "regex":
            grammar = Grammar(kind="regex", text=structured.regex, thought=thought)
        case "choice":
            grammar = Grammar(kind="choice", text=_read_choice(structured.choice), thought=thought)
        case "lark":
            grammar = Grammar(kind="lark", text=structured.lark, thought=thought)
        case _:
            raise InvalidField("structured", None, "one of json_schema, json_object, regex, choice, lark")
    num_bytes = len(grammar.text.encode())
    if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
        raise InvalidField(grammar.field, Summary(f"{num_bytes} bytes"), f"1 to {MAX_GRAMMAR_BYTES} bytes")
    if grammar.kind == "json_schema":
        read_json(grammar.field, grammar.text, "a JSON schema")  # the compiler would take the last of two equal names
    return grammar


def _read_choice(choice: pb.Choices) -> str:
    if not choice.texts or not all(choice.texts):
        raise InvalidField("structured.choice.texts", list(choice.texts)[:8], "at least one text, none empty")
    return json.dumps(list(choice.texts), ensure_ascii=False)


def thought_before(
    asked: bool | None, *, thinks: bool, prompt_ids: Sequence[int], control_ids: Mapping[str, int]
) -> Thought | None:
    """What may stand before the constrained part; None for nothing. `asked` is what the request says of it, if it does;
    the rest as in `read_structured`."""
    opens, closes = (control_ids.get(token) for token in CHANNEL_TOKENS)
    if opens is None or closes is None:
        return None
    ends = (opens, closes, control_ids.get("<|turn>"))
    is_open = next((token_id for token_id in reversed(prompt_ids) if token_id in ends), None) == opens
    may_think = asked if asked is not None else thinks or is_open
    return Thought(opens=opens, closes=closes, is_open=is_open) if may_think else None
