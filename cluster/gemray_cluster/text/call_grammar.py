"""A grammar of calls, in Gemma's notation: `call:NAME{key:value,...}` between two tokens.

Arguments follow the JSON schema of their function's parameters (`call_schema`). Properties come in the order in which
the schema declares them. Lark as llguidance reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemray_cluster.text.call_schema.located import Located
from gemray_cluster.text.call_schema.parameters import arguments_rule
from gemray_cluster.text.call_schema.rules import Rules, literal
from gemray_cluster.text.call_schema.texts import Texts
from gemray_cluster.text.structure import CLOSES_CALL, OPENS_CALL, QUOTE

FIELD = "chat.tools_json"
"""What names the functions in errors."""
TOKENS_OF_CALLS = (OPENS_CALL, CLOSES_CALL, QUOTE)


@dataclass(frozen=True)
class Callable:
    """A function that may be called; its name and its schema have been checked."""

    name: str
    parameters: Located | None
    """None: it takes none."""
    is_lenient: bool = False
    """Whether keywords of its schema that no grammar holds are left to the model."""


def call_grammar(functions: Sequence[Callable], control_ids: Mapping[str, int], *, several: bool) -> str:
    """Lark of one call, or of one and more.

    Args:
        functions: at least one.
        control_ids: of the tokenizer; has `TOKENS_OF_CALLS`.
        several: whether further calls may follow the first.

    Raises:
        InvalidField: a schema that can't be held.
    """
    opens, closes, quote = (f"<[{control_ids[token]}]>" for token in TOKENS_OF_CALLS)
    rules, texts = Rules(quote, FIELD), Texts()
    calls = " | ".join(_call(rules, texts, function) for function in functions)
    call = rules.add(f"{opens} ({calls}) {closes}")
    return rules.text(f"start: {call} {call}*\n" if several else f"start: {call}\n")


def _call(rules: Rules, texts: Texts, function: Callable) -> str:
    arguments = (
        '"{}"'
        if function.parameters is None
        else arguments_rule(rules, function.parameters, texts, is_lenient=function.is_lenient)
    )
    return f"{literal('call:' + function.name)} {arguments}"
