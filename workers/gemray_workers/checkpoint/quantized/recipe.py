"""Which layers of a checkpoint are quantized, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

import torch

from gemray_workers.checkpoint.quantized.formats import WeightFormat
from gemray_workers.errors import InvalidField

ExpertLayout = Literal["each", "stacked", "plain"]
"""Experts as linear layers of their own (``experts.3.up_proj.weight``), as quantized tensors with a dimension of
experts (``experts.down_proj.weight_scale``), or as the plain tensors of the published checkpoints."""

_UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".q_zero_point",
    ".weight_shape",
)
"""Ends of names that come with quantized weights and that no layer reads: what rounded activations are scaled by, a
shape that the config says, too, and the scales of an 8-bit KV cache, which `kv_cache` reads where there is one."""


_SPECIFIC_FIRST = ("name", "regex", "glob", "class")


@dataclass(frozen=True)
class Pattern:
    """What a recipe says of modules whose names match."""

    text: str
    kind: Literal["name", "regex", "glob", "class"]
    """``glob`` matches modules inside the one that is named, too."""

    @property
    def rank(self) -> tuple[int, str]:
        """Smaller for what is more specific; modelopt's names with ``*`` stand in the order of their config."""
        return _SPECIFIC_FIRST.index(self.kind), self.text if self.kind == "regex" else ""

    @classmethod
    def of_compressed_tensors(cls, text: str) -> Pattern:
        """A full name, ``re:`` and a regular expression, or the name of a class."""
        if text.startswith("re:"):
            expression = text.removeprefix("re:")
            try:
                re.compile(expression)
            except re.error as error:
                raise InvalidField("quantization_config target or ignore", text, f"an expression ({error})") from error
            return cls(expression, "regex")
        return cls(text, "class" if text == "Linear" else "name")

    @classmethod
    def of_modelopt(cls, text: str) -> Pattern:
        """A name with ``*``, of a module or of one that contains it."""
        return cls(text, "glob")

    def matches(self, name: str) -> bool:
        """Whether a linear layer of this full name is meant."""
        match self.kind:
            case "class":
                return True
            case "name":
                return self.text == name
            case "regex":
                return re.match(self.text, name) is not None
            case "glob":
                return fnmatchcase(name, self.text) or fnmatchcase(name, f"{self.text}.*")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a checkpoint's config says of its quantized layers."""

    method: str
    """The library that made it."""
    prefix: str
    """What stands before the model's own names on disk."""
    targets: tuple[tuple[Pattern, WeightFormat], ...]
    ignored: tuple[Pattern, ...]
    scale_dtypes: Mapping[str, torch.dtype] = field(hash=False, repr=False)
    """Dtypes of the scales that are on disk, by full name."""
    experts: ExpertLayout = "each"
    experts_name: str = "experts"
    """What a layer's experts are called below it; some exporters have ``moe.experts``."""
    kv_cache: str | None = None
    """The format that it means for keys and values (`kv_cache.kv_cache_format`)."""

    def format_of(self, name: str) -> WeightFormat | None:
        """How a linear layer, named below `prefix`, is quantized; None for one that is not.

        The most specific target decides: a full name, then an expression, of several the first of the alphabet, as the
        library sorts them, then the class of all linear layers.
        """
        names = tuple(self._spellings(name))
        if any(self._ignores(spelling) for spelling in names):
            return None
        for spelling in names:
            if (form := self._by_name.get(spelling)) is not None:
                return form
        return next((form for p, form in self._by_pattern if any(p.matches(spelling) for spelling in names)), None)

    def _ignores(self, name: str) -> bool:
        return name in self._ignored_names or any(pattern.matches(name) for pattern in self._ignored_patterns)

    # Recipes name each of thousands of experts' layers: those are looked up, not searched.

    @cached_property
    def _by_name(self) -> dict[str, WeightFormat]:
        return {pattern.text: form for pattern, form in self.targets if pattern.kind == "name"}

    @cached_property
    def _by_pattern(self) -> list[tuple[Pattern, WeightFormat]]:
        """The most specific first; of one that stands in several groups the last one's format."""
        forms = {pattern: form for pattern, form in self.targets if pattern.kind != "name"}
        return sorted(forms.items(), key=lambda of: of[0].rank)

    @cached_property
    def _ignored_names(self) -> frozenset[str]:
        return frozenset(pattern.text for pattern in self.ignored if pattern.kind == "name")

    @cached_property
    def _ignored_patterns(self) -> list[Pattern]:
        return [pattern for pattern in self.ignored if pattern.kind != "name"]

    def scale_dtype(self, names: Iterable[str], usual: torch.dtype) -> torch.dtype:
        """The dtype that holds some scales, named below `prefix`: theirs on disk, float32 where they have several, the
        usual one where they have none."""
        found = {dtype for name in names if (dtype := self._scale_dtype(name)) is not None}
        return usual if not found else found.pop() if len(found) == 1 else torch.float32

    def _scale_dtype(self, name: str) -> torch.dtype | None:
        found = (self.scale_dtypes.get(spelling) for spelling in self._spellings(name))
        return next((dtype for dtype in found if dtype is not None), None)

    def leaves_unread(self, name: str) -> bool:
        """Whether a tensor of this full name comes with quantized layers and changes nothing that is computed."""
        return name.endswith(_UNUSED)

    @property
    def titles(self) -> tuple[str, ...]:
        """The formats in use, each once."""
        return tuple(dict.fromkeys(form.title for _, form in self.targets))

    @property
    def activations(self) -> tuple[str, ...]:
        """What the recipe would round activations to, each once."""
        return tuple(dict.fromkeys(form.activations for _, form in self.targets if form.activations is not None))

    def _spellings(self, name: str) -> Iterator[str]:
        """A layer's name on disk, and those that other versions of transformers gave it when recipes were written."""
        yield self.prefix + name
        for prefix in ("model.language_model.", "language_model.model.", "model.", "language_model.", ""):
            if prefix != self.prefix:
                yield prefix + name
        if ".moe.experts" in name:
            yield from self._spellings(name.replace(".moe.experts", ".experts"))
