"""One schema object read: its own keywords, without those that bring in other schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gemray_cluster.text.call_schema.formats import FORMATS, INTEGERS, SAYS_NOTHING
from gemray_cluster.text.call_schema.located import Located, shown
from gemray_cluster.text.call_schema.pattern import UnknownPattern, in_slashes, whole_text_pattern
from gemray_cluster.text.call_schema.shape import (
    ANYTHING,
    ArrayPart,
    Arrays,
    Counts,
    Numbers,
    ObjectPart,
    Objects,
    Shape,
    Strings,
    key_of,
)
from gemray_cluster.text.call_schema.texts import Texts
from gemray_workers.errors import InvalidField
from gemray_workers.grammar.schema_numbers import BOUNDS, MOST_EXACT, widen_bounds

HELD = (
    "type, enum, const, nullable, properties, required, additionalProperties, patternProperties, propertyNames, "
    "minProperties, maxProperties, items, prefixItems, minItems, maxItems, minimum, maximum, exclusiveMinimum, "
    "exclusiveMaximum, multipleOf, minLength, maxLength, pattern, format, anyOf, oneOf, allOf, $ref"
)
_NOT_HELD = (
    "not", "contains", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
LENIENT = '"strict": false leaves to the model what cannot be held'
_MAX_LENGTH = 1 << 20
"""Most that a string's length can be held to; more is as good as no bound."""


class Faults:
    """What to do with keywords that no grammar holds."""

    def __init__(self, *, is_lenient: bool) -> None:
        """`is_lenient`: they are left to the model."""
        self._is_lenient = is_lenient

    def unheld(self, path: str, value: object, allowed: str) -> None:
        """Refuse a keyword, unless it may be left to the model; raises InvalidField."""
        if not self._is_lenient:
            raise InvalidField(path, shown(value), f"{allowed} ({LENIENT})")


class KeywordReader:
    """Reads schemas that are well-formed (`check_schema`)."""

    def __init__(self, faults: Faults, texts: Texts) -> None:
        """For the schemas of one request."""
        self._faults = faults
        self._texts = texts

    def read(self, located: Located) -> Shape:
        """The shape of one schema's own keywords; raises InvalidField for what can't be held."""
        schema = located.schema
        if isinstance(schema, bool):
            return ANYTHING if schema else Shape(kinds=frozenset())
        self._refuse_unheld(located)
        return Shape(
            kinds=_kinds(schema),
            values=_values(schema),
            numbers=self._numbers(located),
            strings=self._strings(located),
            arrays=self._arrays(located),
            objects=self._objects(located),
        )

    def _refuse_unheld(self, located: Located) -> None:
        schema = located.schema
        for keyword in _NOT_HELD:
            if schema.get(keyword) not in (None, {}, True) or (keyword == "not" and keyword in schema):
                self._faults.unheld(
                    located.place_of(keyword), schema[keyword], f"the keywords that can be held: {HELD}"
                )
        if "if" in schema and ("then" in schema or "else" in schema):
            self._faults.unheld(located.place_of("if"), schema["if"], "anyOf, whose alternatives can be held")
        if isinstance(schema.get("unevaluatedProperties"), dict):
            keyword = "unevaluatedProperties"
            self._faults.unheld(located.place_of(keyword), schema[keyword], "true or false")

    def _numbers(self, located: Located) -> Numbers:
        schema, bits = located.schema, INTEGERS.get(located.schema.get("format") or "")
        least, above = _bound(schema, "minimum", "exclusiveMinimum")
        most, below = _bound(schema, "maximum", "exclusiveMaximum")
        step = schema.get("multipleOf")
        numbers = Numbers(least, above, most, below, () if step is None else (step,))
        if not self._are_exact(located) or not all(
            self._are_held(located, kind, numbers) for kind in ("integer", "number")
        ):
            numbers = Numbers()
        return numbers if bits is None else numbers.meet(Numbers(least=bits[0], most=bits[1]))

    def _are_exact(self, located: Located) -> bool:
        """Whether doubles hold all bounds, but for those that no integer of 18 digits comes to; raises InvalidField."""
        inexact = [key for key in BOUNDS if MOST_EXACT < abs(located.schema.get(key) or 0) < _MOST_INTEGER]
        for key in inexact:
            allowed = f"a number from {-MOST_EXACT} to {MOST_EXACT}, or an enum"
            self._faults.unheld(located.place_of(key), located.schema[key], allowed)
        return not inexact

    def _are_held(self, located: Located, kind: str, numbers: Numbers) -> bool:
        """Whether numbers of a kind can be held, if a schema has them; raises InvalidField."""
        stated = _kinds(located.schema)
        if numbers.says_nothing or numbers.is_empty or (stated is not None and kind not in stated):
            return True
        reason = self._texts.fault_of_numbers(number_rule(kind, numbers))
        if reason is None or "Unsatisfiable" in reason:
            return True
        keywords = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        keyword = next(keyword for keyword in keywords if located.schema.get(keyword) is not None)
        self._faults.unheld(located.place_of(keyword), located.schema[keyword], "a number that can be held")
        return False

    def _strings(self, located: Located) -> Strings:
        schema = located.schema
        most = schema.get("maxLength")
        length = Counts(_count(schema, "minLength"), None if most is None or most > _MAX_LENGTH else int(most))
        if length.least > _MAX_LENGTH:
            self._faults.unheld(located.place_of("minLength"), length.least, f"at most {_MAX_LENGTH}")
            length = Counts(0, length.most)
        expressions = (self._pattern(located, "pattern", schema.get("pattern")), self._format(located))
        return Strings(length, tuple(expression for expression in expressions if expression is not None))

    def _pattern(self, located: Located, keyword: str, pattern: str | None) -> str | None:
        """The expression of all texts that a pattern matches in; None for none, and for one left to the model."""
        if pattern is None:
            return None
        path = located.place_of(keyword) if keyword == "pattern" else located.place_of(keyword, pattern)
        try:
            expression = whole_text_pattern(pattern)
        except UnknownPattern as error:
            self._faults.unheld(path, pattern, f"a pattern that can be held; this one has {error}")
            return None
        reason = self._texts.fault_of(in_slashes(expression))
        if reason is not None:
            self._faults.unheld(path, pattern, "a pattern that can be held: smaller, of classes that Unicode knows")
            return None
        return expression

    def _format(self, located: Located) -> str | None:
        name, kinds = located.schema.get("format"), _kinds(located.schema)
        if name is None or name in SAYS_NOTHING or name in INTEGERS or (kinds is not None and "string" not in kinds):
            return None
        if name not in FORMATS:
            self._faults.unheld(located.place_of("format"), name, f"one of {', '.join(FORMATS)}")
        return FORMATS.get(name)

    def _arrays(self, located: Located) -> Arrays:
        schema = located.schema
        keyword = "prefixItems" if schema.get("prefixItems") is not None else "items"
        listed = schema.get(keyword)
        prefix: tuple[Located, ...] = ()
        rest = None if schema.get("items") is None else "items"
        if isinstance(listed, list):  # `items` was one before there were `prefixItems`
            prefix = tuple(located.at(keyword, index) for index in range(len(listed)))
            if keyword == "items":
                rest = None if schema.get("additionalItems") is None else "additionalItems"
        if isinstance(schema.get(rest or ""), list):
            raise InvalidField(located.place_of("items"), shown(schema["items"]), "one schema beside prefixItems")
        part = ArrayPart(prefix, None if rest is None else located.at(rest))
        most = schema.get("maxItems")
        is_unique = schema.get("uniqueItems") is True
        return Arrays(
            () if part == ArrayPart() else (part,),
            Counts(_count(schema, "minItems"), None if most is None else int(most)),
            is_unique,
            located.place_of("uniqueItems") if is_unique else "",
        )

    def _objects(self, located: Located) -> Objects:
        schema = located.schema
        properties, patterns = schema.get("properties"), schema.get("patternProperties") or {}
        read = ((self._pattern(located, "patternProperties", pattern), pattern) for pattern in patterns)
        part = ObjectPart(
            {name: located.at("properties", name) for name in properties or ()},
            tuple((expression, located.at("patternProperties", name)) for expression, name in read if expression),
            None if schema.get("additionalProperties") is None else located.at("additionalProperties"),
            declares=properties is not None,
        )
        least, most = _count(schema, "minProperties"), schema.get("maxProperties")
        return Objects(
            () if part == ObjectPart() else (part,),
            tuple(dict.fromkeys(schema.get("required") or ())),
            Counts(least, None if most is None else int(most)),
            located.place_of("minProperties") if least else "",
            () if schema.get("propertyNames") is None else (located.at("propertyNames"),),
            is_evaluated=schema.get("unevaluatedProperties") is False,
        )


_MOST_INTEGER = 10**18 - 128
"""The largest double of 18 digits: bounds go through doubles."""


def number_rule(kind: str, numbers: Numbers) -> str:
    """The rule of the numbers of a kind, in Lark. Integers have at most 18 digits, as without bounds."""
    schema: dict[str, Any] = {"type": kind}
    least, most = numbers.least, numbers.most
    if kind == "integer":
        least = -_MOST_INTEGER if least is None else max(least, -_MOST_INTEGER)
        most = _MOST_INTEGER if most is None else min(most, _MOST_INTEGER)
    bounds = {"minimum": least, "exclusiveMinimum": numbers.above, "maximum": most, "exclusiveMaximum": numbers.below}
    schema |= {keyword: bound for keyword, bound in bounds.items() if bound is not None}
    if len(numbers.steps) == 1:
        schema = widen_bounds({**schema, "multipleOf": numbers.steps[0]})
    elif numbers.steps:
        schema["allOf"] = [{"multipleOf": step} for step in numbers.steps]
    return f"%json {json.dumps(schema)}"


def _kinds(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """None where no type is stated."""
    stated = schema.get("type")
    if stated is None:
        return None
    kinds = {kind.lower() for kind in (stated if isinstance(stated, list) else [stated])}
    if "number" in kinds:
        kinds.add("integer")
    if schema.get("nullable") is True:
        kinds.add("null")
    return frozenset(kinds)


def _values(schema: Mapping[str, Any]) -> tuple[Any, ...] | None:
    listed = schema.get("enum")
    if "const" in schema:
        only = schema["const"]
        return (only,) if listed is None or any(key_of(only) == key_of(value) for value in listed) else ()
    return None if listed is None else tuple({key_of(value): value for value in listed}.values())


def _bound(schema: Mapping[str, Any], keyword: str, exclusive: str) -> tuple[float | None, float | None]:
    """(the bound, the bound that is excluded): once the second keyword was true or false, and said so of the first."""
    bound, excluded = schema.get(keyword), schema.get(exclusive)
    if isinstance(excluded, bool):
        return (None, bound) if excluded else (bound, None)
    return bound, excluded


def _count(schema: Mapping[str, Any], keyword: str) -> int:
    return int(schema.get(keyword) or 0)
