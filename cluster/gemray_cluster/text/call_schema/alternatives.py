"""What schemas that hold at once allow, as alternatives: references followed, combinations multiplied out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gemray_cluster.text.call_schema.fitting import Fitting
from gemray_cluster.text.call_schema.keywords import Faults, KeywordReader
from gemray_cluster.text.call_schema.located import Conjunction, Located, target_of
from gemray_cluster.text.call_schema.shape import ANYTHING, Rivals, Shape, joined
from gemray_cluster.text.call_schema.texts import Texts
from gemray_cluster.text.call_schema.well_formed import check_schema
from gemray_workers.errors import InvalidField, Summary

MAX_ALTERNATIVES = 256
_MAX_REFERENCES = 64
"""References that lead to references, one after the other."""


class Alternatives:
    """Those of the schemas of one function."""

    def __init__(self, root: Located, faults: Faults, texts: Texts) -> None:
        """`root` is what references start from."""
        self._root = root
        self._reader = KeywordReader(faults, texts)
        self._known: dict[str, list[Shape]] = {}
        self._checked: set[str] = set()
        self.fitting = Fitting(self.of, texts)

    def of(self, schemas: Conjunction) -> list[Shape]:
        """The shapes one of which each value has that all the schemas allow; raises InvalidField."""
        shapes = [ANYTHING]
        for located in schemas:
            shapes = self._bounded(joined(shapes, self._of(located, ())), located)
        return shapes

    def _of(self, located: Located, behind: tuple[str, ...]) -> list[Shape]:
        """`behind` are the schemas whose references have led here."""
        if located.path in self._known:
            return self._known[located.path]
        if located.path in behind or len(behind) > _MAX_REFERENCES:
            raise InvalidField(
                located.path, Summary("a schema that refers to itself"), "one that does so from a property or an item"
            )
        shapes = [self._reader.read(located)]
        shapes = [shape for shape in shapes if shape.kinds != frozenset() and shape.values != ()]
        if isinstance(located.schema, dict):
            behind = (*behind, located.path)
            for part in self._parts(located):
                shapes = self._bounded(joined(shapes, self._of(part, behind)), located)
            shapes = self._with_options(located, shapes, behind)
        self._known[located.path] = shapes
        return shapes

    def _parts(self, located: Located) -> Iterable[Located]:
        """Schemas that hold beside its own keywords."""
        if (reference := located.schema.get("$ref")) is not None:
            target = target_of(reference, self._root, located.place_of("$ref"))
            if target.path not in self._checked:  # it may lie where no schema is looked for
                self._checked.add(target.path)
                check_schema(target)
            yield target
        for index in range(len(located.schema.get("allOf") or ())):
            yield located.at("allOf", index)

    def _with_options(self, located: Located, shapes: list[Shape], behind: tuple[str, ...]) -> list[Shape]:
        for keyword in ("anyOf", "oneOf"):
            listed = located.schema.get(keyword)
            if listed is None:
                continue
            options = [self._of(located.at(keyword, index), behind) for index in range(len(listed))]
            self._bounded([shape for option in options for shape in option], located)
            if keyword == "oneOf":  # one of them and no other; which values are written is known in the end
                options = [_with_rivals(located, options, index) for index in range(len(options))]
            shapes = self._bounded([shape for option in options for shape in joined(shapes, option)], located)
        return shapes

    def _bounded(self, shapes: list[Shape], located: Located) -> list[Shape]:
        if len(shapes) > MAX_ALTERNATIVES:
            raise InvalidField(
                located.path, Summary(f"{len(shapes)} alternatives"), f"at most {MAX_ALTERNATIVES}, multiplied out"
            )
        return shapes


def _with_rivals(located: Located, options: list[list[Shape]], index: int) -> list[Shape]:
    others = tuple(shape for other, option in enumerate(options) if other != index for shape in option)
    rivals = (Rivals(located, others),) if others else ()
    return [replace(shape, rivals=shape.rivals + rivals) for shape in options[index]]
