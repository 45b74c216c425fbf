"""From a request's grammar to a matcher; the place is named at which one can't be met or compiled."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.deep_stack import on_deep_stack
from gemray_workers.grammar.forced_bytes import MAX_FORCED_BYTES, num_forced_bytes
from gemray_workers.grammar.grammar import Grammar, GrammarKind
from gemray_workers.grammar.lark_rules import check_lark
from gemray_workers.grammar.optional_parts import check_optional_parts
from gemray_workers.grammar.reasons import first_line
from gemray_workers.grammar.schema_ends import check_ends
from gemray_workers.grammar.schema_limits import MAX_PROPERTIES, check_sizes, check_values
from gemray_workers.grammar.schema_numbers import check_numbers, widen_all
from gemray_workers.grammar.schema_tree import parts
from gemray_workers.grammar.vocabulary import END_MARK

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # stated in its stubs alone

MAX_GRAMMAR_BYTES = 256 << 10
"""Most bytes of a schema, an expression or a Lark grammar, or of all strings of a choice."""
MAX_DEPTH = 64
"""Objects and arrays of a schema, one inside the other."""
MAX_CHOICES = 4096
WHITESPACE = r"(\n[ \t]{0,32}|[ ]{1,2})"
"""Between the marks of a JSON text: a line break and an indent, or a space. Without a bound a model that has lost its
way writes spaces to the end of its budget."""
_OPTIONS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE}
_MAX_KEPT = 32
"""Compiled grammars that are kept, the newest used last."""
_MAX_PROBES = 64
"""Parts of a faulty schema that are tried for the place of its fault."""
_MAX_ITEMS = 8 * MAX_PROPERTIES
"""Places in a grammar that a text may stand at: four for each optional property, and what stands around them."""
_MAX_DIGITS = 40
"""More than any integer of a schema may have."""
_UNSATISFIABLE = "Unsatisfiable schema"


class GrammarCompiler:
    """Compiles for one vocabulary. May be used by several threads; while a grammar is compiled the others run."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        """For the ids of a model; `vocabulary` as `grammar_vocabulary` makes it."""
        self._vocabulary = vocabulary
        # Work for one mask is bounded by counts and not by time, so that every run gives the same masks.
        self._limits = LLParserLimits(verbose_errors=False, max_items_in_row=_MAX_ITEMS)
        self._compiled: OrderedDict[tuple[GrammarKind, str], LLMatcher] = OrderedDict()
        self._lock = Lock()

    @property
    def vocab_size(self) -> int:
        """Ids of the model."""
        return self._vocabulary.vocab_size

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher that has seen nothing; raises InvalidField. What many requests ask for is compiled once."""
        key = grammar.kind, grammar.text
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found.deep_copy()
        matcher = on_deep_stack(partial(self._compile, grammar))
        with self._lock:
            self._compiled[key] = matcher.deep_copy()
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = _source(grammar)
        matcher = self._matcher(source)
        forced = num_forced_bytes(matcher)
        if forced > MAX_FORCED_BYTES:
            value = Summary(f"a form whose texts all begin with the same {forced} bytes")
            raise InvalidField(grammar.field, value, f"at most {MAX_FORCED_BYTES}; put them into the prompt")
        first_W = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)  # takes longest of all: its work is kept
        if matcher.is_error():
            place, reason = self._place(grammar, first_line(matcher.get_error()))
            raise InvalidField(grammar.field + place, Summary("a form that can't be used"), reason)
        if set(np.unpackbits(first_W, bitorder="little").nonzero()[0]) <= {END_MARK}:
            raise InvalidField(grammar.field, Summary("a grammar of the empty text alone"), "one that allows some text")
        return matcher

    def _matcher(self, source: str) -> LLMatcher:
        return LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)

    def _place(self, grammar: Grammar, reason: str) -> tuple[str, str]:
        """Where a schema's fault lies and what it is.

        Returns:
            ("#/..." of the smallest part that fails for this reason, or "" for the whole; the reason there).
        """
        reason, pointer = _told_place(reason)
        if grammar.kind != "json_schema" or pointer:
            return pointer, reason
        root = json.loads(grammar.text)
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        part, probes, found = root, 0, True
        while found:
            found = False
            for step, child in parts(part):
                probes += 1
                if probes > _MAX_PROBES:
                    break
                probe = json.dumps({**definitions, **child})
                matcher = self._matcher(LLMatcher.grammar_from_json_schema(probe, overrides=_OPTIONS))
                own = _told_place(first_line(matcher.get_error()))[0] if matcher.is_error() else None
                if own is not None and (own == reason or _follows(reason, step, own)):
                    part, pointer, found, reason = child, pointer + step, True, own
                    break
        return (f"#{pointer}" if pointer else ""), reason


def _told_place(message: str) -> tuple[str, str]:
    """(message, pointer), for what llguidance finds behind references."""
    told = re.search(r" while processing json-schema:///(#/\S+)$", message)
    return (message, "") if told is None else (message[: told.start()], told[1])


def _follows(reason: str, step: str, of_part: str) -> bool:
    """Whether a schema can't be met because a part of it can't; an alternative may fail without harm."""
    is_alternative = step.startswith(("/anyOf", "/oneOf"))
    return reason.startswith(_UNSATISFIABLE) and of_part.startswith(_UNSATISFIABLE) and not is_alternative


def _source(grammar: Grammar) -> str:
    """As llguidance reads it; raises InvalidField for what is no JSON, and for what is too large."""
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidField(grammar.field, Summary(f"{num_bytes} bytes"), f"at most {MAX_GRAMMAR_BYTES}")
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_read_schema(grammar), overrides=_OPTIONS)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_OPTIONS)
        case "regex":
            check_optional_parts(grammar.field, grammar.text)
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            # One expression: of rules llguidance follows 2,000 at a time.
            choices: list[str] = json.loads(grammar.text)
            return LLMatcher.grammar_from_regex("|".join(map(_literal, choices)))
        case "lark":
            if grammar.asked_by is None:  # others are of the server's own making
                check_lark(grammar.field, grammar.text)
            return LLMatcher.grammar_from_lark(grammar.text)


def _literal(text: str) -> str:
    """The expression of this text alone. Other marks than these mean themselves; not all may be escaped."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/\x00-\x1f\x7f]", lambda mark: rf"\x{{{ord(mark[0]):x}}}", text)


def _read_schema(grammar: Grammar) -> dict[str, Any]:
    """Refuses what could stop the process: depth before it is parsed."""
    depth = deepest = 0
    for mark in re.findall(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', grammar.text):
        depth += (mark in "[{") - (mark in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise InvalidField(grammar.field, Summary(f"nested {deepest} deep"), f"at most {MAX_DEPTH} deep")
    try:
        schema = json.loads(grammar.text, parse_int=_integer)
    except ValueError as error:
        raise InvalidField(grammar.field, Summary.of_text(grammar.text), f"JSON ({error})") from None
    if not isinstance(schema, dict):
        raise InvalidField(grammar.field, Summary.of_text(grammar.text), "a JSON schema that is an object")
    check_values(grammar.field, schema)
    check_sizes(grammar.field, schema)
    check_ends(grammar.field, schema)
    _refuse_counted_names(grammar, schema)
    check_numbers(grammar.field, schema)
    widened: dict[str, Any] = widen_all(schema)
    return widened


def _integer(digits: str) -> int:
    """An integer, or the first digits of one that is refused with its place whatever they are."""
    return int(digits[:_MAX_DIGITS])


def _refuse_counted_names(grammar: Grammar, schema: dict[str, Any], pointer: str = "") -> None:
    """Refuse what llguidance would meet by writing a name twice: only names that a schema lists are written once."""
    least, required = schema.get("minProperties"), schema.get("required")
    listed = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > listed:
        place = f"#{pointer}" if pointer else ""
        reason = f"minProperties ({least}) must not be above the number of required names ({listed})"
        raise InvalidField(grammar.field + place, Summary("a form that can't be used"), reason)
    for step, part in parts(schema):
        _refuse_counted_names(grammar, part, pointer + step)
