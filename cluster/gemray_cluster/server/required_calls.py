"""Calls that follow a grammar: where a chat requires them, and where a function is strict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.chat import ChatInput, ToolChoice
from gemray_cluster.server.chat_tools import DeclaredFunction
from gemray_cluster.server.structured import thought_before
from gemray_cluster.text.call_grammar import FIELD, TOKENS_OF_CALLS, Callable, call_grammar
from gemray_cluster.text.call_schema.located import Located
from gemray_cluster.text.structure import OPENS_CALL
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.compiler import MAX_GRAMMAR_BYTES
from gemray_workers.grammar.grammar import Grammar


def read_required_calls(chat: ChatInput, prompt_ids: Sequence[int], control_ids: Mapping[str, int]) -> Grammar:
    """The grammar of the calls that a chat requires, behind a thought where it thinks; raises InvalidField.

    Args:
        chat: its tool_choice requires a call.
        prompt_ids: a template may leave a thought open at their end.
        control_ids: of the tokenizer.
    """
    if not _has_calls(control_ids):
        raise InvalidField("chat.tool_choice", Summary("a call"), "auto or none: the tokenizer has no tokens of calls")
    functions = [
        Callable(function.name, function.parameters, is_lenient=function.is_strict is False)
        for function in _callable(chat.functions, chat.choice)
    ]
    thought = thought_before(None, thinks=bool(chat.enable_thinking), prompt_ids=prompt_ids, control_ids=control_ids)
    text = _checked(call_grammar(functions, control_ids, several=not chat.takes_one_call))
    return Grammar(kind="lark", text=text, thought=thought, asked_by=FIELD)


def read_strict_calls(chat: ChatInput, control_ids: Mapping[str, int]) -> Grammar | None:
    """The grammar of each call of a chat that may call, where one of its functions is strict; raises InvalidField.

    None where none is. Functions that are not take any arguments.
    """
    if not (chat.choice.may_call and any(function.is_strict for function in chat.functions)):
        return None
    if not _has_calls(control_ids):
        return None
    functions = [
        Callable(function.name, function.parameters if function.is_strict else Located({}, FIELD))
        for function in chat.functions
    ]
    text = _checked(call_grammar(functions, control_ids, several=False))
    return Grammar(kind="lark", text=text, begins_at=control_ids[OPENS_CALL], asked_by=FIELD)


def _has_calls(control_ids: Mapping[str, int]) -> bool:
    return all(token in control_ids for token in TOKENS_OF_CALLS)


def _checked(text: str) -> str:
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidField(FIELD, Summary(f"a grammar of {num_bytes} bytes"), f"at most {MAX_GRAMMAR_BYTES}")
    return text


def _callable(functions: Sequence[DeclaredFunction], choice: ToolChoice) -> Sequence[DeclaredFunction]:
    """The functions that may be called; raises InvalidField when there is none."""
    if choice.function is None:
        if not functions:
            value = Summary(pb.ToolChoiceMode.Name(pb.TOOL_CHOICE_MODE_REQUIRED))
            raise InvalidField("chat.tool_choice.mode", value, "TOOL_CHOICE_MODE_AUTO for a chat without tools")
        return functions
    named = [function for function in functions if function.name == choice.function]
    if not named:
        raise InvalidField(
            "chat.tool_choice.function", Summary.of_text(choice.function), "the name of one of the chat's tools"
        )
    return named
