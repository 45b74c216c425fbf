"""Whether values fit a shape, and whether two shapes have none in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemray_cluster.text.call_schema.located import Conjunction
from gemray_cluster.text.call_schema.shape import Arrays, Counts, Numbers, Objects, Shape, Strings, key_of, kind_of
from gemray_cluster.text.call_schema.texts import Texts, terminal_of
from gemray_workers.grammar.schema_numbers import is_multiple

_MAX_DEPTH = 4
"""Properties inside each other that are looked at to tell two shapes apart."""


class Fitting:
    """Asks about the shapes of one function."""

    def __init__(self, alternatives: Callable[[Conjunction], Sequence[Shape]], texts: Texts) -> None:
        """`alternatives` of schemas that hold at once."""
        self._alternatives = alternatives
        self._texts = texts

    def fits(self, value: Any, shape: Shape) -> bool:
        """Whether a value has a shape."""
        if kind_of(value) not in shape.allowed_kinds:
            return False
        if shape.values is not None and key_of(value) not in map(key_of, shape.values):
            return False
        checks: dict[str, Callable[[Any], bool]] = {
            "string": lambda value: self._fits_string(value, shape.strings),
            "array": lambda value: self._fits_array(value, shape.arrays),
            "object": lambda value: self._fits_object(value, shape.objects),
            "number": lambda value: _fits_number(value, shape.numbers),
            "integer": lambda value: _fits_number(value, shape.numbers),
        }
        check = checks.get(kind_of(value))
        return check is None or check(value)

    def fits_any(self, value: Any, schemas: Conjunction) -> bool:
        """Whether a value meets schemas that hold at once."""
        return any(self.fits(value, shape) for shape in self._alternatives(schemas))

    def _fits_string(self, value: str, strings: Strings) -> bool:
        return _holds(strings.length, len(value)) and all(
            self._texts.matches(expression, value) for expression in strings.expressions
        )

    def _fits_array(self, value: list[Any], arrays: Arrays) -> bool:
        if arrays.is_unique and len(set(map(key_of, value))) < len(value):
            return False
        return _holds(arrays.length, len(value)) and all(
            self.fits_any(item, arrays.item(index)) for index, item in enumerate(value)
        )

    def _fits_object(self, value: dict[str, Any], objects: Objects) -> bool:
        if not _holds(objects.size, len(value)) or not value.keys() >= set(objects.required):
            return False
        for name, inner in value.items():
            schemas = objects.member(name, self._texts.matches)
            if schemas is None or not self.fits_any(inner, schemas) or not self.fits_any(name, objects.names):
                return False
        return True

    def never(self, written: Shape, other: Shape, depth: int = 0) -> bool:
        """Whether no value that is written for the first has the second, as far as can be told.

        Objects are written with the properties that they declare, so they may lack what the other requires.
        """
        if written.values is not None:
            return not any(self.fits(value, other) for value in written.values if self.fits(value, written))
        if other.values is not None:
            return not any(self.fits(value, written) for value in other.values if self.fits(value, other))
        return all(
            self._never_of_kind(kind, written, other, depth) for kind in written.possible_kinds & other.allowed_kinds
        )

    def _never_of_kind(self, kind: str, written: Shape, other: Shape, depth: int) -> bool:
        match kind:
            case "integer" | "number":
                return written.numbers.meet(other.numbers).is_empty
            case "string":
                strings = written.strings.meet(other.strings)
                if strings.length.is_empty:
                    return True
                return not self._texts.has_some(terminal_of(strings.expressions, strings.length))
            case "array":
                return written.arrays.length.meet(other.arrays.length).is_empty
            case "object":
                return self._never_objects(written.objects, other.objects, depth)
        return False

    def _never_objects(self, written: Objects, other: Objects, depth: int) -> bool:
        if any(not self._may_have(written, name) for name in other.required):
            return True
        for name in written.required:
            ours, theirs = (one.member(name, self._texts.matches) for one in (written, other))
            if ours is None or theirs is None:
                return True
            if depth < _MAX_DEPTH and all(
                self.never(a, b, depth + 1) for a in self._alternatives(ours) for b in self._alternatives(theirs)
            ):
                return True
        return written.size.meet(other.size).is_empty

    def _may_have(self, written: Objects, name: str) -> bool:
        if name not in written.declared and not written.is_open:
            return False
        return written.member(name, self._texts.matches) is not None


def _fits_number(value: float, numbers: Numbers) -> bool:
    narrowed = numbers.meet(Numbers(least=value, most=value))
    return not narrowed.is_empty and all(is_multiple(value, step) for step in numbers.steps)


def _holds(counts: Counts, length: int) -> bool:
    return not counts.meet(Counts(length, length)).is_empty
