"""The sequences that hold a slot, as every rank knows them: tokens, parameters, block tables.

Rank 0 decides and sends step plans; each rank applies the same plans to the same table, so nothing but the
plan ever travels. What a forward pass reads lies in device tensors that keep their addresses.

Shape legend: N slots, L token columns, P block-table columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemray_workers.engine.host_copy import to_device
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.state import SamplingState
from gemray_workers.scheduling.plan import Admission, PageGrant, ScheduledRows, StepPlan


@dataclass
class Slot:
    """One sequence on this rank."""

    request_id: str
    prompt_len: int
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then what was generated; drafts are not part of it."""


class SlotTable:
    """Fixed-size tables of `num_slots` sequences of at most `max_model_len` tokens, plus drafts."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        max_draft_tokens: int,
        specs: Sequence[KVGroupSpec],
        sampling: SamplingState,
        device: torch.device,
    ) -> None:
        num_columns = max_model_len + max_draft_tokens + 1
        self.page_size: Mapping[str, int] = {spec.name: spec.page_size for spec in specs}
        self.token_ids_NL = torch.zeros(num_slots, num_columns, dtype=torch.int64, device=device)
        self.block_tables_NP: Mapping[str, Tensor] = {
            spec.name: torch.zeros(num_slots, -(-num_columns // spec.page_size), dtype=torch.int32, device=device)
            for spec in specs
        }
        self.computed_N = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Tokens whose KV is valid."""
        self.accepted_N = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Drafts that the last verification accepted."""
        self.sampling = sampling
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, slot: int) -> Slot:
        """The sequence in `slot`; KeyError when it is free."""
        return self._slots[slot]

    def __len__(self) -> int:
        """How many slots are taken."""
        return len(self._slots)

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

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note committed tokens behind the last one; verification has put them into the device table already."""
        self._slots[slot].token_ids.extend(token_ids)

    def advance(self, rows: Sequence[ScheduledRows]) -> None:
        """The rows of a step are computed: known ones and, where a sequence sampled, its accepted drafts."""
        facts = torch.tensor([(r.slot, r.num_known, r.samples) for r in rows]).to(self.device, non_blocking=True)
        slot_S, known_S, samples_S = facts.unbind(1)
        self.computed_N[slot_S] += known_S + samples_S * self.accepted_N[slot_S]

    def _release(self, slot: int) -> None:
        del self._slots[slot]
        self.sampling.release(slot)
        for table_NP in self.block_tables_NP.values():
            table_NP[slot] = 0

    def _admit(self, admission: Admission) -> None:
        if admission.slot in self._slots:
            raise RuntimeError(f"slot {admission.slot} is taken by {self._slots[admission.slot].request_id}")
        self._slots[admission.slot] = Slot(
            admission.request_id, admission.prompt_len, admission.params, list(admission.token_ids)
        )
        self.computed_N[admission.slot] = 0
        self.sampling.admit(admission.slot, admission.params, admission.token_ids, admission.prompt_len)
        tokens_L = to_device(admission.token_ids, self.device)
        self.token_ids_NL[admission.slot, : len(tokens_L)] = tokens_L

    def _grant(self, grants: Iterable[PageGrant]) -> None:
        """Write all new pages of a group with one indexed store; groups on another worker are passed over."""
        by_group: dict[str, tuple[list[int], list[int], list[int]]] = {}
        for grant in grants:
            if grant.group not in self.block_tables_NP:
                continue
            rows, columns, pages = by_group.setdefault(grant.group, ([], [], []))
            rows += [grant.slot] * len(grant.pages)
            columns += range(grant.first, grant.first + len(grant.pages))
            pages += grant.pages
        for group, (rows, columns, pages) in by_group.items():
            table_NP = self.block_tables_NP[group]
            rows_G, columns_G = to_device([rows, columns], self.device)
            table_NP[rows_G, columns_G] = to_device(pages, self.device, torch.int32)
