"""How many pages each KV group gets out of a stated number of bytes, and the longest sequence that then fits.

Sliding groups need a fixed amount a sequence whatever its length, full groups grow with every token. First of all one
sequence of the served length must fit alone, together with one step's rows. Then room is made for as many windows as
sequences may run, as long as the full groups keep a few windows' worth of tokens for each; the rest goes to the full
groups, up to what the sequences could ever use.

With steps in flight (lag 1) the host gives windows back a step late and grants rows for a sequence that may stand
anywhere between the least and the most that those steps can give. So beside each window lie the rows of the steps in
flight and of the next one: room is made for `1 + lag` times a step's rows. Full groups need nothing more, as rows are
never granted behind the end of a sequence.

Drafts of any drafter take rows in the target's sliding groups until they are verified, so a window is given their
pages, too; a drafter that owns no KV adds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.kv.block_table import most_pages, pages_for
from gemray_workers.kv.spec import KVGroupSpec

_MIB = 1 << 20
_SHORTEST_LEN = 2
"""One prompt token and one generated token."""
_WINDOWS_OF_TOKENS = 4
"""Windows' worth of full-group tokens that a sequence with a filled window is taken to hold: with fewer, memory for
windows would stand empty while sequences wait for full pages."""


@dataclass(frozen=True)
class PoolPlan:
    """The pools of one rank."""

    num_pages: dict[str, int]
    """By group: pages that sequences can own (the null page not counted)."""
    max_model_len: int
    """Most tokens of a sequence: as asked, or as many as one sequence alone can hold."""
    num_windows: int
    """Sequences whose sliding windows fit at one time, at any length."""
    num_bytes: int
    """Bytes of all pools, null pages included."""


def fit_pools(
    specs: Sequence[KVGroupSpec],
    *,
    kv_memory_bytes: int,
    requested_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
    num_draft_tokens: int,
    lag: int = 0,
    longest_share: float = 1.0,
) -> PoolPlan:
    """Divide `kv_memory_bytes` among the groups of one rank.

    Args:
        requested_len: the length wanted, in tokens; what is served may be less, never more.
        lag: steps that may be in flight while the next one is planned.
        longest_share: part of the memory that one sequence of the served length may take. 1 serves the longest
            sequence that fits, alone if need be; less leaves room for others beside it. A share that holds not even
            the shortest sequence is taken as 1.

    Raises:
        InvalidField: `requested_len` is too short for any request.
        CapacityError: not even the shortest sequence fits.
    """
    if requested_len < _SHORTEST_LEN:
        raise InvalidField("max_model_len", requested_len, f"an integer >= {_SHORTEST_LEN}")
    demand = _Demand(tuple(specs), max_num_seqs, (1 + lag) * max_step_tokens, num_draft_tokens)
    share = int(kv_memory_bytes * longest_share)
    for_longest = share if demand.bytes_alone(_SHORTEST_LEN) <= share else kv_memory_bytes
    max_len = _largest(requested_len, lambda length: demand.bytes_alone(length) <= for_longest)
    if max_len < _SHORTEST_LEN:
        raise CapacityError(
            f"one sequence of {_SHORTEST_LEN} tokens needs {demand.bytes_alone(_SHORTEST_LEN) / _MIB:.2f} MiB, "
            f"{kv_memory_bytes / _MIB:.2f} MiB are available ({requested_len} tokens would need "
            f"{demand.bytes_alone(requested_len) / _MIB:.2f} MiB)"
        )

    def windows_fit(num_windows: int) -> bool:
        least_full_tokens = max(max_len, num_windows * demand.tokens_beside_window(max_len))
        return demand.bytes_of(demand.pages(max_len, num_windows, least_full_tokens)) <= kv_memory_bytes

    num_windows = max(1, _largest(max_num_seqs, windows_fit))
    most_full_tokens = max_num_seqs * demand.padded_len(max_len)
    full_tokens = _largest(
        most_full_tokens,
        lambda tokens: demand.bytes_of(demand.pages(max_len, num_windows, max(max_len, tokens))) <= kv_memory_bytes,
    )
    num_pages = demand.pages(max_len, num_windows, max(max_len, full_tokens))
    return PoolPlan(num_pages, max_len, num_windows, demand.bytes_of(num_pages))


def pages_together(
    specs: Sequence[KVGroupSpec],
    *,
    length: int,
    num_seqs: int,
    max_step_tokens: int,
    num_draft_tokens: int,
    lag: int = 0,
) -> dict[str, int]:
    """Pages by group with which `num_seqs` sequences decode at one time up to `length` tokens each, however a step's
    rows are dealt among them. They may begin one after the other: an admission takes each chunk of a prompt for itself,
    and together chunks may be more than a step. `lag` is as of `fit_pools`.
    """
    demand = _Demand(tuple(specs), num_seqs, (1 + lag) * max_step_tokens, num_draft_tokens)
    return demand.pages(length, num_seqs, num_seqs * demand.padded_len(length))


@dataclass(frozen=True)
class _Demand:
    """Pages and bytes that a load needs."""

    specs: tuple[KVGroupSpec, ...]
    max_num_seqs: int
    max_rows: int
    """Rows that may lie beside windows: those of a step, and of the steps in flight before it."""
    num_draft_tokens: int

    def pages(self, max_len: int, num_windows: int, full_tokens: int) -> dict[str, int]:
        """Pages by group for `num_windows` windows and `full_tokens` tokens in the full groups."""
        return {
            spec.name: self._window_pages(spec, spec.window, max_len, num_windows)
            if spec.window is not None
            else self._full_pages(spec, max_len, full_tokens)
            for spec in self.specs
        }

    def bytes_of(self, num_pages: dict[str, int]) -> int:
        """Bytes of the pools, each with its null page."""
        return sum((num_pages[spec.name] + 1) * spec.page_bytes for spec in self.specs)

    def bytes_alone(self, length: int) -> int:
        """Bytes of the pools that hold one sequence of this length and all rows that may lie beside its window."""
        return self.bytes_of(self.pages(length, 1, length))

    def tokens_beside_window(self, max_len: int) -> int:
        """Full-group tokens that a sequence with a filled window is taken to hold."""
        return min([max_len, *(_WINDOWS_OF_TOKENS * spec.window for spec in self.specs if spec.window is not None)])

    def padded_len(self, max_len: int) -> int:
        """Tokens of the whole pages that a sequence of `max_len` takes, in the group with the largest pages."""
        return max(pages_for(max_len, spec.page_size) * spec.page_size for spec in self.specs)

    def _window_pages(self, spec: KVGroupSpec, window: int, max_len: int, num_windows: int) -> int:
        """Windows plus `max_rows` rows, however they are dealt among the sequences.

        A sequence with n rows in the step and in flight holds at most ceil((window + n - 1) / page) + 1 pages, and the
        n of all sequences add up to at most `max_rows`; rounding up costs each at most one page more, and rejected
        drafts of the step before may still have pages behind the rows.
        """
        alone = most_pages(max_len, spec.page_size, window, self.max_rows)
        each = pages_for(window + self.num_draft_tokens, spec.page_size) + 2
        together = num_windows * each + pages_for(self.max_rows, spec.page_size)
        every_token = num_windows * pages_for(max_len, spec.page_size)
        return alone if num_windows == 1 else max(alone, min(together, every_token))

    def _full_pages(self, spec: KVGroupSpec, max_len: int, full_tokens: int) -> int:
        every_token = self.max_num_seqs * pages_for(max_len, spec.page_size)
        return min(pages_for(full_tokens, spec.page_size), every_token)


def _largest(highest: int, holds: Callable[[int], bool]) -> int:
    """Largest n in 0..highest for which `holds`; it holds up to some n and for none above (0 is not asked)."""
    low = 0
    while low < highest:
        middle = (low + highest + 1) // 2
        if holds(middle):
            low = middle
        else:
            highest = middle - 1
    return low
