"""The pages of one sequence in one KV group: a window of block-table columns that moves to the right.

Column c holds the positions [c * page_size, (c + 1) * page_size). With C tokens computed, a group with a window W
keeps the columns of the last W computed tokens. The next query, at position C, sees positions > C - W; position
C - W itself is kept for a drafter that reads this cache with a query standing on the last computed token
(spec section 4.4). Kept by tokens, the rule costs at most one page and needs no special case.
"""

from __future__ import annotations

from collections.abc import Sequence


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens from a page border on."""
    return -(-num_tokens // page_size)


def most_pages(num_tokens: int, page_size: int, window: int | None, max_rows: int) -> int:
    """Most pages that a sequence of `num_tokens` tokens ever holds when a step computes at most `max_rows` of them.

    Rows are written before they are read, so in a step the old window and the new rows lie side by side:
    window + max_rows tokens, which may straddle one page border more than they fill pages.
    """
    all_columns = pages_for(num_tokens, page_size)
    if window is None:
        return all_columns
    return min(all_columns, pages_for(window + max_rows - 1, page_size) + 1)


class SequencePages:
    """Which page holds which positions of one sequence."""

    def __init__(self, page_size: int, window: int | None) -> None:
        self._page_size = page_size
        self._window = window
        self._first_column = 0
        self._pages: list[int] = []
        self._num_announced_columns = 0

    @property
    def first_column(self) -> int:
        """Columns left of it are given back."""
        return self._first_column

    @property
    def pages(self) -> Sequence[int]:
        """The pages held, from `first_column` on."""
        return self._pages

    @property
    def end(self) -> int:
        """The first position that no page covers."""
        return (self._first_column + len(self._pages)) * self._page_size

    def num_missing(self, end: int) -> int:
        """Pages to add so that every position below `end` is covered."""
        return max(0, pages_for(end, self._page_size) - self._first_column - len(self._pages))

    def adopt(self, first_column: int, pages: Sequence[int]) -> None:
        """Begin with the pages of a text's beginning, from `first_column` on; only before any other."""
        assert self.end == 0, "a sequence begins once"
        self._first_column = self._num_announced_columns = first_column
        self._pages.extend(pages)

    def page_at(self, column: int) -> int | None:
        """The page of a column, or None when it is given back."""
        return None if column < self._first_column else self._pages[column - self._first_column]

    def extend(self, pages: Sequence[int]) -> None:
        """Add columns on the right."""
        self._pages.extend(pages)

    def release_out_of_window(self, num_computed: int) -> list[int]:
        """Give back the pages that hold none of the last `window` of `num_computed` tokens; a full group keeps all."""
        if self._window is None:
            return []
        first_kept = max(0, num_computed - self._window) // self._page_size
        count = max(0, first_kept - self._first_column)
        released, self._pages = self._pages[:count], self._pages[count:]
        self._first_column += len(released)
        return released

    def take_new(self) -> tuple[int, list[int]] | None:
        """The columns added since the last call, as (first column, pages), or None."""
        num_columns = self._first_column + len(self._pages)
        if num_columns == self._num_announced_columns:
            return None
        first = self._num_announced_columns
        self._num_announced_columns = num_columns
        return first, self._pages[first - self._first_column :]
