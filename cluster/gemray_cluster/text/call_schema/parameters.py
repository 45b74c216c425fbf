"""The rules of one function's arguments, from the JSON schema of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemray_cluster.text.call_schema.alternatives import Alternatives
from gemray_cluster.text.call_schema.keywords import Faults, number_rule
from gemray_cluster.text.call_schema.located import Conjunction, Located
from gemray_cluster.text.call_schema.members import Entry, Members, items_expression
from gemray_cluster.text.call_schema.pattern import in_slashes, literal_pattern
from gemray_cluster.text.call_schema.rules import KEY, Rules
from gemray_cluster.text.call_schema.shape import (
    ALL_KINDS,
    Arrays,
    Counts,
    Numbers,
    Objects,
    Shape,
    Strings,
    key_of,
    kind_of,
)
from gemray_cluster.text.call_schema.texts import Texts, terminal_of
from gemray_workers.errors import InvalidField, Summary

Key = tuple[str, ...]
MAX_UNIQUE = 64
"""Values that the items of an array may have, which must be unique."""
_MAX_TRIED = 256
"""Values listed beside a pattern or a format, each of which is tried with it."""


def arguments_rule(rules: Rules, parameters: Located, texts: Texts, *, is_lenient: bool) -> str:
    """The rule of a call's arguments, braces included.

    Args:
        rules: get what is needed.
        parameters: has been checked (`check_schema`).
        texts: of the request.
        is_lenient: whether keywords that can't be held are left to the model.

    Raises:
        InvalidField: what can't be held, or no arguments meet the schema.
    """
    faults = Faults(is_lenient=is_lenient)
    alternatives = Alternatives(parameters, faults, texts)
    impossible: set[Key] = set()
    contradictory: list[str] = []
    while True:
        attempt = _Attempt(rules, parameters, alternatives, texts, faults, impossible)
        found = attempt.run()
        endless = attempt.endless()
        contradictory += attempt.empty
        if attempt.root in endless or found is None:
            if not contradictory:
                value = Summary("a schema whose values contain themselves without an end")
                raise InvalidField(
                    parameters.path, value, "one with an end: an optional property, null, an empty array"
                )
            raise InvalidField(contradictory[0], Summary("a schema that no value meets"), "one that some value meets")
        if not endless - impossible:
            return found
        impossible |= endless


class _Attempt:
    """Writes the rules, taking it that all values are possible but those that are known not to be.

    A value is impossible where it contradicts itself, or would have to contain itself without an end: which of them
    are is known once all rules are written.
    """

    def __init__(
        self,
        rules: Rules,
        root: Located,
        alternatives: Alternatives,
        texts: Texts,
        faults: Faults,
        impossible: set[Key],
    ) -> None:
        self._rules = rules
        self._alternatives = alternatives
        self._fitting = alternatives.fitting
        self._texts = texts
        self._faults = faults
        self._impossible = impossible
        self._root = (root,)
        self.root: Key = (root.path,)
        self._names: dict[Key, str] = {}
        self._waiting: list[tuple[Key, Conjunction]] = []
        self._needs: dict[Key, list[list[Key]]] = {}
        """The values that each one must contain, for each of its alternatives."""
        self.empty: list[str] = []
        """Places of schemas that contradict themselves."""

    def run(self) -> str | None:
        """The rule of the root; None where there is none."""
        name = self._value(self._root, is_root=True)
        while self._waiting:  # not by recursion: references may lead through a thousand schemas
            key, schemas = self._waiting.pop()
            self._needs[key] = []
            bodies = [
                body
                for shape in self._checked(self._alternatives.of(schemas))
                for body in self._bodies(key, shape, kinds={"object"} if key == self.root else ALL_KINDS)
            ]
            if not bodies and self._needs[key] == []:
                self.empty += [located.path for located in schemas[:1]]
            self._rules.state(self._names[key], " | ".join(dict.fromkeys(bodies)) or '""')
        return name

    def _checked(self, shapes: list[Shape]) -> list[Shape]:
        """The shapes, if none may have values that oneOf gives to another; raises InvalidField."""
        for shape in shapes:
            for rivals in shape.rivals:
                if not all(self._fitting.never(shape, rival) for rival in rivals.shapes):
                    self._faults.unheld(
                        rivals.at.place_of("oneOf"),
                        rivals.at.schema["oneOf"],
                        "anyOf, or alternatives that differ in type or in a required property with a constant",
                    )
        return shapes

    def endless(self) -> set[Key]:
        """Values that are impossible: no alternative of theirs needs only possible ones."""
        possible: set[Key] = set()
        is_growing = True
        while is_growing:
            found = {
                key
                for key, alternatives in self._needs.items()
                if key not in possible and any(possible.issuperset(needs) for needs in alternatives)
            }
            possible |= found
            is_growing = bool(found)
        return self._needs.keys() - possible

    def _value(self, schemas: Conjunction, *, is_root: bool = False) -> str | None:
        """The name of the rule of what schemas allow; None where that is nothing."""
        schemas = tuple(located for located in schemas if located.schema is not True and located.schema != {})
        if not schemas and not is_root:
            return "any_value"
        key = _key(schemas) or self.root
        if key in self._impossible:
            return None
        if key not in self._names:
            self._names[key] = self._rules.reserve()
            self._waiting.append((key, schemas))
        return self._names[key]

    def _bodies(self, key: Key, shape: Shape, *, kinds: set[str] | frozenset[str]) -> Iterator[str]:
        """The alternatives of a shape, by kind; what each needs is noted."""
        if shape.values is not None:
            yield from self._constants(key, shape, kinds)
            return
        if shape.says_nothing and kinds == ALL_KINDS:
            self._needs[key].append([])
            yield "any_value"
            return
        for kind in sorted(shape.possible_kinds & kinds):
            if kind == "integer" and "number" in shape.possible_kinds:
                continue  # one of them
            body, needs = self._of_kind(kind, shape)
            if body is not None:
                self._needs[key].append(needs)
                yield body

    def _constants(self, key: Key, shape: Shape, kinds: set[str] | frozenset[str]) -> Iterator[str]:
        values = shape.values or ()
        if shape.strings.expressions and len(values) > _MAX_TRIED:
            raise InvalidField(
                key[0], Summary(f"{len(values)} values beside a pattern or a format"), f"at most {_MAX_TRIED}"
            )
        for value in values:
            if kind_of(value) in kinds and self._fitting.fits(value, shape):
                self._needs[key].append([])
                yield self._rules.constant(value)

    def _of_kind(self, kind: str, shape: Shape) -> tuple[str | None, list[Key]]:
        """(the values of a kind, the values that each of them contains)."""
        match kind:
            case "object":
                return self._object(shape.objects)
            case "array":
                return self._array(shape.arrays)
            case "string":
                return self._string(shape.strings), []
            case "boolean":
                return '"true" | "false"', []
            case "null":
                return '"null"', []
        return self._number(kind, shape.numbers), []

    def _string(self, strings: Strings) -> str | None:
        if strings.says_nothing:
            return self._rules.string
        terminal = terminal_of(strings.expressions, strings.length)
        if strings.length.is_empty or not self._texts.has_some(terminal):
            return None
        return self._rules.string_of(terminal)

    def _number(self, kind: str, numbers: Numbers) -> str | None:
        if numbers.says_nothing:
            return kind.upper()
        rule = number_rule(kind, numbers)
        if numbers.is_empty or self._texts.fault_of_numbers(rule) is not None:
            return None
        return self._rules.add(rule)

    def _array(self, arrays: Arrays) -> tuple[str | None, list[Key]]:
        if arrays.length.is_empty:
            return None, []
        if arrays.is_unique and arrays.length.most not in (0, 1):
            values = self._listed_items(arrays)
            if values is not None:
                entries = [Entry(self._rules.constant(value)) for value in values]
                return _closed_in("[", Members(self._rules, entries, None, arrays.length).expression(), "]"), []
        prefix, more, needs = [], None, []
        for index in range(arrays.prefix_length):
            rule = self._value(arrays.item(index))
            if rule is None:
                break  # the array ends before it
            prefix.append(rule)
            needs += self._needed(arrays.item(index)) if index < arrays.length.least else []
        else:
            more = self._value(arrays.item(arrays.prefix_length))
        if arrays.length.least > len(prefix) and more is not None:
            needs += self._needed(arrays.item(arrays.prefix_length))
        return _closed_in("[", items_expression(self._rules, prefix, more, arrays.length), "]"), needs

    def _listed_items(self, arrays: Arrays) -> list[Any] | None:
        """The values that items may have, where they are listed; None where they are not."""
        shapes = self._alternatives.of(arrays.item(0))
        listed = {
            key_of(value): value for shape in shapes for value in shape.values or () if self._fitting.fits(value, shape)
        }
        if (
            arrays.prefix_length == 0
            and len(listed) <= MAX_UNIQUE
            and all(shape.values is not None for shape in shapes)
        ):
            return list(listed.values())
        self._faults.unheld(
            arrays.unique_at, True, f"false, unless maxItems is 1 or items have an enum of at most {MAX_UNIQUE} values"
        )
        return None

    def _object(self, objects: Objects) -> tuple[str | None, list[Key]]:
        if objects.says_nothing:
            return "any_object", []
        names, others = self._names_of(objects)
        entries, needs = [], list[Key]()
        for name in names:
            schemas = objects.member(name, self._texts.matches)
            is_named = not objects.names or self._fitting.fits_any(name, objects.names)
            rule = None if schemas is None or not is_named else self._value(schemas)
            is_required = name in objects.required
            pair = None if rule is None else self._rules.add(f"{self._rules.key(name)} {rule}")
            if is_required and schemas is None:
                self.empty += [part.properties[name].path for part in objects.parts if name in part.properties]
            entries.append(Entry(pair, is_required))
            needs += self._needed(schemas or ()) if is_required else []
        more = self._other_members(objects, names, others)
        size = objects.size
        most_least = sum(entry.rule is not None for entry in entries) + (more is not None)
        if size.least > most_least and more is not None:
            self._faults.unheld(
                objects.size_at,
                size.least,
                f"at most {most_least}: other names than declared ones may be written twice",
            )
            size = Counts(most_least, size.most)
        members = Members(self._rules, entries, more, size, may_repeat=True).expression()
        return _closed_in("{", members, "}"), needs

    def _names_of(self, objects: Objects) -> tuple[tuple[str, ...], list[Strings]]:
        """(names that are known, what others look like)."""
        if not objects.names:
            return objects.declared, [Strings()]
        known, others = list(objects.declared), list[Strings]()
        for shape in self._alternatives.of(objects.names):
            if shape.values is None:
                others += [shape.strings] if "string" in shape.possible_kinds else []
            elif objects.is_open:
                known += [value for value in shape.values if isinstance(value, str)]
        return tuple(dict.fromkeys(known)), others

    def _other_members(self, objects: Objects, names: tuple[str, ...], others: list[Strings]) -> str | None:
        """The rule of members that are not declared; None where there are none."""
        if not objects.is_open:
            return None
        patterns = dict.fromkeys(expression for part in objects.parts for expression, _ in part.patterns)
        pairs = []
        for own in (*patterns, None):
            schemas, is_known = list[Located](), False
            for part in objects.parts:
                found = [schema for expression, schema in part.patterns if expression == own]
                found += [] if found or part.rest is None else [part.rest]
                is_known = is_known or bool(found)
                schemas += found
            if any(schema.schema is False for schema in schemas) or (objects.is_evaluated and not is_known):
                continue
            not_these = [pattern for pattern in patterns if pattern != own] + [literal_pattern(name) for name in names]
            for strings in others:
                key = self._other_key(strings, own, not_these)
                value = None if key is None else self._value(tuple(dict.fromkeys(schemas)))
                pairs += [] if value is None else [f'{key} ":" {value}']
        return self._rules.add(" | ".join(dict.fromkeys(pairs))) if pairs else None

    def _other_key(self, strings: Strings, pattern: str | None, not_these: list[str]) -> str | None:
        """The terminal of keys that are of a pattern and of no others; None where there are none."""
        if strings.says_nothing and pattern is None and not not_these:
            return "KEY"
        parts = [KEY]
        if not strings.says_nothing:
            parts.append(terminal_of(strings.expressions, strings.length))
        if pattern is not None:
            parts.append(in_slashes(pattern))
        if not_these:
            parts.append("~" + in_slashes("|".join(not_these)))
        terminal = " & ".join(parts)
        return self._rules.terminal(terminal) if self._texts.has_some(terminal) else None

    def _needed(self, schemas: Conjunction) -> list[Key]:
        key = _key(schemas)
        return [key] if key in self._names else []


def _key(schemas: Conjunction) -> Key:
    return tuple(sorted(located.path for located in schemas if located.schema is not True and located.schema != {}))


def _closed_in(opens: str, inside: str | None, closes: str) -> str | None:
    return None if inside is None else f'"{opens}" {inside} "{closes}"'
