"""A chat that requires calls: its answer follows a grammar of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.chat import ChatInput, ToolChoice
from gemray_cluster.server.chat_tools import DeclaredFunction
from gemray_cluster.server.structured import thought_before
from gemray_cluster.text.call_grammar import TOKENS_OF_CALLS, Callable, call_grammar
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
    if any(token not in control_ids for token in TOKENS_OF_CALLS):
        raise InvalidField("chat.tool_choice", Summary("a call"), "auto or none: the tokenizer has no tokens of calls")
    functions = [
        Callable(function.name, function.parameters, is_lenient=function.is_strict is False)
        for function in _callable(chat.functions, chat.choice)
    ]
    text = call_grammar(functions, control_ids, several=not chat.takes_one_call)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidField(
            "chat.tools_json", Summary(f"a grammar of {len(text.encode())} bytes"), f"at most {MAX_GRAMMAR_BYTES}"
        )
    thought = thought_before(None, thinks=bool(chat.enable_thinking), prompt_ids=prompt_ids, control_ids=control_ids)
    return Grammar(kind="lark", text=text, thought=thought, asked_by="chat.tools_json")


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
