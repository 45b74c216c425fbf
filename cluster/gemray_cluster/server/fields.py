"""Checks of single request fields; each raises InvalidField with the field's dotted name."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gemray_workers.errors import InvalidField, Summary


def integer(field: str, value: int, low: int, high: int | None) -> int:
    """`value` if it is in low..high; `high` None has no upper end."""
    if value < low or (high is not None and value > high):
        raise InvalidField(field, value, f"an integer >= {low}" if high is None else f"an integer {low}..{high}")
    return value


def number(field: str, value: float, low: float, high: float) -> float:
    """`value` if it is in low..high, which NaN is not."""
    if not low <= value <= high:
        raise InvalidField(field, value, f"a number {low}..{high}")
    return value


def at_most(field: str, values: Collection[object], most: int, what: str) -> None:
    """Raise if there are more than `most`: by length alone, before any of them is looked at."""
    if len(values) > most:
        raise InvalidField(field, Summary(f"{len(values)} {what}"), f"at most {most} {what}")


def check_token_ids(field: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The ids, all of which the model has a row for."""
    token_ids = tuple(ids)
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidField(field, largest, f"token ids 0..{vocab_size - 1}")
    return token_ids
