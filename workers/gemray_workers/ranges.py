"""Numbers that a config's field may hold, stated at the field: checks, errors and tests read them there."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from gemray_workers.errors import InvalidField

_KEY = "range"
_KIB = 1 << 10


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`."""

    least: float
    most: float | None = None
    """None for no upper limit."""
    unit: str = "an integer"
    """What the number is, in words for errors."""
    excludes_least: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the field may hold the value; NaN is in no range."""
        above = value > self.least if self.excludes_least else value >= self.least
        return above and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        """The bounds as help texts tell them: ``>= 1``, ``0..65535``, ``0 or 1``, ``> 0 and <= 1``, ``>= 64KiB``."""
        if self.most is not None and self.excludes_least:
            return f"> {self.least:g} and <= {self.most:g}"
        if self.most is None:
            least = f"{int(self.least) // _KIB}KiB" if self.unit == "bytes" else f"{self.least:g}"
            return f"{'>' if self.excludes_least else '>='} {least}"
        return f"{self.least:g} or {self.most:g}" if self.most - self.least == 1 else f"{self.least:g}..{self.most:g}"


AT_LEAST_ONE = Range(1)
NOT_NEGATIVE = Range(0)
DURATION = Range(0, unit="seconds", excludes_least=True)
POSITIVE = Range(0, unit="a number", excludes_least=True)
SHARE = Range(0, 1, unit="a number", excludes_least=True)


def ranged(bounds: Range, default: Any = MISSING) -> Any:
    """A dataclass field that holds a number of `bounds`, or None where that is its default."""
    return field(default=default, metadata={_KEY: bounds})


def ranges_of(config: type[Any]) -> dict[str, Range]:
    """The range of each field of a dataclass that has one."""
    return {f.name: f.metadata[_KEY] for f in fields(config) if _KEY in f.metadata}


def check_ranges(config: Any) -> None:
    """Check every ranged field of a dataclass.

    Raises:
        InvalidField: the first field whose number lies outside.
    """
    for f in fields(config):
        bounds: Range | None = f.metadata.get(_KEY)
        value = getattr(config, f.name)
        if bounds is None or (value is None and f.default is None):
            continue
        if value not in bounds:
            raise InvalidField(f.name, value, f"{bounds.unit} {bounds}" + (", or unset" if f.default is None else ""))
