"""The sequences that hold a slot, as every rank knows them: tokens, lengths, parameters, block tables.

Rank 0 decides and sends step plans; each rank applies the same plans to the same table, so nothing but the plan ever
travels. What a cycle reads and writes lies in device tensors that keep their addresses. One slot more than sequences
can hold, the null slot, takes rows that belong to no sequence: it has no token computed, its end is 0 and its pages are
the null page.

Shape legend: N slots, the null slot last; L token columns, P block-table columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import PagePlace, PageTables, SequenceTables
from gemray_kernels.table import row_kernels_for
from gemray_workers.execution.host_copy import to_device
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.sampling.state import SamplingState
from gemray_workers.scheduling.plan import Admission, PageGrant, StepPlan


class SlotTable:
    """Fixed-size tables of `num_slots` sequences of at most `max_model_len` tokens, plus drafts."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        num_draft_tokens: int,
        specs: Sequence[KVGroupSpec],
        sampling: SamplingState,
        device: torch.device,
    ) -> None:
        num_columns = max_model_len + num_draft_tokens + 1
        self.null_slot = num_slots
        self._max_model_len = max_model_len
        self.page_size: Mapping[str, int] = {spec.name: spec.page_size for spec in specs}
        self.token_ids_NL = torch.zeros(num_slots + 1, num_columns, dtype=torch.int64, device=device)
        self._pages = torch.zeros(
            sum((num_slots + 1) * -(-num_columns // size) for size in self.page_size.values()),
            dtype=torch.int32,
            device=device,
        )
        """Every group's block table, one behind the other: one store brings a step's grants of all groups."""
        self._places: dict[str, PagePlace] = {}
        first = 0
        for name, size in self.page_size.items():
            self._places[name] = PagePlace(first, -(-num_columns // size), size)
            first += (num_slots + 1) * self._places[name].width
        self._page_tables: dict[tuple[str, ...], PageTables] = {}
        all_groups = self.pages(tuple(self._places))
        self.block_tables_NP: Mapping[str, Tensor] = {
            name: all_groups.table(i, num_slots + 1) for i, name in enumerate(self._places)
        }
        self.computed_N = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """Tokens whose KV is valid."""
        self.end_N = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """Tokens that the sequence has at its end, at most: its budget and the context limit."""
        self.tables = SequenceTables(self.token_ids_NL, self.computed_N, self.end_N)
        self.row_kernels = row_kernels_for(device)
        self.sampling = sampling
        self._slots: dict[int, Admission] = {}
        """What follows an admission's tokens is on the device alone."""

    def __getitem__(self, slot: int) -> Admission:
        """The sequence in `slot`, as it was admitted; KeyError when it is free."""
        return self._slots[slot]

    def __len__(self) -> int:
        """How many slots are taken."""
        return len(self._slots)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the KV groups."""
        return tuple(self._places)

    def pages(self, groups: Sequence[str]) -> PageTables:
        """Block tables of some KV groups, as kernels read them. The first call with these groups copies a few numbers
        to the device, so it must come before anything is captured."""
        key = tuple(groups)
        found = self._page_tables.get(key)
        if found is None:
            found = self._page_tables[key] = PageTables.of(self._pages, [self._places[group] for group in key])
        return found

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.token_ids_NL.device

    def apply(self, plan: StepPlan) -> None:
        """Carry out a plan's releases, admissions and grants, in this order."""
        for slot in plan.released:
            self._release(slot)
        for admission in plan.admitted:
            self._admit(admission)
        self._grant(plan.granted)

    def _release(self, slot: int) -> None:
        del self._slots[slot]
        self.sampling.release(slot)
        for table_NP in self.block_tables_NP.values():
            table_NP[slot] = 0

    def _admit(self, admission: Admission) -> None:
        if admission.slot in self._slots:
            raise RuntimeError(f"slot {admission.slot} is taken by {self._slots[admission.slot].request_id}")
        self._slots[admission.slot] = admission
        self.computed_N[admission.slot] = admission.num_computed
        self.end_N[admission.slot] = min(admission.prompt_len + admission.params.max_tokens, self._max_model_len)
        self.sampling.admit(admission.slot, admission.params, admission.token_ids, admission.prompt_len)
        tokens_L = to_device(admission.token_ids, self.device)
        self.token_ids_NL[admission.slot, : len(tokens_L)] = tokens_L

    def _grant(self, grants: Iterable[PageGrant]) -> None:
        """Write all new pages with one indexed store; groups on another worker are passed over."""
        cells: list[int] = []
        pages: list[int] = []
        for grant in grants:
            place = self._places.get(grant.group)
            if place is None:
                continue
            first = place.first_cell + grant.slot * place.width + grant.first
            cells += range(first, first + len(grant.pages))
            pages += grant.pages
        if cells:
            cell_G, page_G = to_device([cells, pages], self.device)
            self._pages[cell_G] = page_G.to(torch.int32)
