"""llguidance recurses: what a grammar has room for overflows a thread's usual stack, and not this one."""

from __future__ import annotations

import threading

import pytest
from llguidance import LLMatcher

from gemray_workers.embedded import embedded_path
from gemray_workers.grammar.deep_stack import on_deep_stack
from gemray_workers.grammar.vocabulary import vocabulary_of_directory


def test_a_grammar_of_the_largest_depth_compiles() -> None:
    vocabulary = vocabulary_of_directory(str(embedded_path("gemray-tiny")), 512)
    assert vocabulary is not None
    rules = "\n".join(f"x{i}: x{i + 1}" for i in range(19_000))
    source = LLMatcher.grammar_from_lark(f'start: x0\n{rules}\nx19000: "a"')
    matcher = on_deep_stack(lambda: LLMatcher(vocabulary, source, log_level=0))
    assert not matcher.is_error()


def test_what_the_work_raises_is_raised() -> None:
    before = threading.stack_size()
    with pytest.raises(ValueError, match="invalid literal"):
        on_deep_stack(lambda: int("x"))
    assert threading.stack_size() == before
