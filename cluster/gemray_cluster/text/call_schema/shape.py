"""What a schema allows, its keywords merged: of each kind of value, which ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gemray_cluster.text.call_schema.located import Conjunction, Located
from gemray_cluster.text.call_schema.well_formed import KINDS

ALL_KINDS = frozenset(KINDS)


@dataclass(frozen=True)
class Counts:
    """From the least to the most, both included."""

    least: int = 0
    most: int | None = None

    def meet(self, other: Counts) -> Counts:
        """What both allow."""
        mosts = [most for most in (self.most, other.most) if most is not None]
        return Counts(max(self.least, other.least), min(mosts, default=None))

    @property
    def is_empty(self) -> bool:
        """Whether there are none, as far as bounds tell."""
        return self.most is not None and self.most < self.least

    @property
    def says_nothing(self) -> bool:
        """Whether all are allowed."""
        return self == Counts()


@dataclass(frozen=True)
class Numbers:
    """Which numbers."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    steps: tuple[float, ...] = ()
    """They are multiples of each."""

    def meet(self, other: Numbers) -> Numbers:
        """What both allow."""
        return Numbers(
            _larger(self.least, other.least),
            _larger(self.above, other.above),
            _smaller(self.most, other.most),
            _smaller(self.below, other.below),
            tuple(dict.fromkeys(self.steps + other.steps)),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are none, as far as bounds tell."""
        lows = [(low, is_open) for low, is_open in ((self.least, False), (self.above, True)) if low is not None]
        highs = [(high, is_open) for high, is_open in ((self.most, False), (self.below, True)) if high is not None]
        return any(low > high or (low == high and (a or b)) for low, a in lows for high, b in highs)

    @property
    def says_nothing(self) -> bool:
        """Whether all are allowed."""
        return self == Numbers()


@dataclass(frozen=True)
class Strings:
    """Which strings."""

    length: Counts = Counts()
    """In characters."""
    expressions: tuple[str, ...] = ()
    """Expressions of whole texts, all of which hold."""

    def meet(self, other: Strings) -> Strings:
        """What both allow."""
        expressions = tuple(dict.fromkeys(self.expressions + other.expressions))
        return Strings(self.length.meet(other.length), expressions)

    @property
    def says_nothing(self) -> bool:
        """Whether all are allowed."""
        return self == Strings()


@dataclass(frozen=True)
class ArrayPart:
    """What one schema says of items."""

    prefix: tuple[Located, ...] = ()
    rest: Located | None = None
    """What items behind the prefix hold; None: anything."""


@dataclass(frozen=True)
class Arrays:
    """Which arrays."""

    parts: tuple[ArrayPart, ...] = ()
    length: Counts = Counts()
    is_unique: bool = False
    unique_at: str = ""
    """Where that is said."""

    def meet(self, other: Arrays) -> Arrays:
        """What both allow."""
        return Arrays(
            self.parts + other.parts,
            self.length.meet(other.length),
            self.is_unique or other.is_unique,
            self.unique_at or other.unique_at,
        )

    @property
    def prefix_length(self) -> int:
        """Items behind which all are alike."""
        return max((len(part.prefix) for part in self.parts), default=0)

    def item(self, index: int) -> Conjunction:
        """What the item at an index must meet."""
        found = [part.prefix[index] if index < len(part.prefix) else part.rest for part in self.parts]
        return tuple(schema for schema in found if schema is not None)

    @property
    def says_nothing(self) -> bool:
        """Whether all are allowed."""
        return self == Arrays()


@dataclass(frozen=True)
class ObjectPart:
    """What one schema says of members."""

    properties: Mapping[str, Located] = field(default_factory=dict)
    patterns: tuple[tuple[str, Located], ...] = ()
    """Expressions of whole names."""
    rest: Located | None = None
    """What other members hold; None where nothing is said."""
    declares: bool = False
    """Whether it has properties, be there none of them."""


@dataclass(frozen=True)
class Objects:
    """Which objects."""

    parts: tuple[ObjectPart, ...] = ()
    required: tuple[str, ...] = ()
    size: Counts = Counts()
    size_at: str = ""
    """Where the least is said."""
    names: Conjunction = ()
    """What names must meet."""
    is_evaluated: bool = False
    """Whether names that no part knows are forbidden."""

    def meet(self, other: Objects) -> Objects:
        """What both allow."""
        return Objects(
            self.parts + other.parts,
            tuple(dict.fromkeys(self.required + other.required)),
            self.size.meet(other.size),
            self.size_at or other.size_at,
            self.names + other.names,
            self.is_evaluated or other.is_evaluated,
        )

    @property
    def declared(self) -> tuple[str, ...]:
        """Names in the order of their declaration, then those that are only required."""
        named = (name for part in self.parts for name in part.properties)
        return tuple(dict.fromkeys((*named, *self.required)))

    @property
    def is_open(self) -> bool:
        """Whether other names may be written: where a schema says what they hold, or declares none at all."""
        if any(part.rest is not None or part.patterns for part in self.parts):
            return True
        return not self.required and not any(part.declares for part in self.parts)

    def member(self, name: str, matches: Callable[[str, str], bool]) -> Conjunction | None:
        """What a member must meet; None where it may not be there.

        `matches(expression, name)` says whether a name is of a pattern.
        """
        found: list[Located] = []
        is_known = False
        for part in self.parts:
            own = [part.properties[name]] if name in part.properties else []
            own += [schema for expression, schema in part.patterns if matches(expression, name)]
            is_known = is_known or bool(own) or part.rest is not None
            found += own or ([] if part.rest is None else [part.rest])
        is_forbidden = any(schema.schema is False for schema in found) or (self.is_evaluated and not is_known)
        return None if is_forbidden else tuple(dict.fromkeys(found))

    @property
    def says_nothing(self) -> bool:
        """Whether all are allowed."""
        return self == Objects()


@dataclass(frozen=True)
class Rivals:
    """Alternatives that a value of a shape must not have, too."""

    at: Located
    """The schema that says so by oneOf."""
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Shape:
    """One alternative of what a schema allows."""

    kinds: frozenset[str] | None = None
    """None where no type is stated; a number's are `number` and `integer`."""
    values: tuple[Any, ...] | None = None
    """The only ones, if they are listed; what else is said holds of them, too."""
    numbers: Numbers = Numbers()
    strings: Strings = Strings()
    arrays: Arrays = Arrays()
    objects: Objects = Objects()
    rivals: tuple[Rivals, ...] = field(default=(), compare=False)

    def meet(self, other: Shape) -> Shape | None:
        """What both allow; None where that is nothing at first sight."""
        kinds = self.kinds if other.kinds is None else other.kinds
        if self.kinds is not None and other.kinds is not None:
            kinds = self.kinds & other.kinds
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            known = set(map(key_of, other.values))
            values = tuple(value for value in self.values if key_of(value) in known)
        if kinds == frozenset() or values == ():
            return None
        return Shape(
            kinds,
            values,
            self.numbers.meet(other.numbers),
            self.strings.meet(other.strings),
            self.arrays.meet(other.arrays),
            self.objects.meet(other.objects),
            self.rivals + other.rivals,
        )

    @property
    def allowed_kinds(self) -> frozenset[str]:
        """The kinds that values may have."""
        return ALL_KINDS if self.kinds is None else self.kinds

    @property
    def possible_kinds(self) -> frozenset[str]:
        """The kinds that are written; where no type is stated, that of which alone something is said, if it is objects
        or arrays."""
        if self.kinds is not None or self.values is not None:
            return self.allowed_kinds
        if not self.objects.says_nothing and self.arrays.says_nothing:
            return frozenset({"object"})
        if not self.arrays.says_nothing and self.objects.says_nothing:
            return frozenset({"array"})
        return ALL_KINDS

    @property
    def says_nothing(self) -> bool:
        """Whether it allows everything."""
        return replace(self, kinds=None) == Shape() and self.possible_kinds == ALL_KINDS


ANYTHING = Shape()


_KINDS_OF_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def kind_of(value: Any) -> str:
    """The narrowest kind of a value of JSON."""
    return _KINDS_OF_TYPES[type(_normal(value))]


def key_of(value: Any) -> str:
    """The same for values that JSON Schema calls equal: 1 and 1.0, but not true."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if isinstance(value, dict):
        return {key: _normal(inner) for key, inner in value.items()}
    return value


def joined(shapes: Iterable[Shape], others: Iterable[Shape]) -> list[Shape]:
    """What one of each allows together."""
    others = list(others)
    met = (one.meet(other) for one in shapes for other in others)
    return [shape for shape in met if shape is not None]


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _smaller(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)
