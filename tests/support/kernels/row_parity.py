"""The row kernels against their references on random sequences: integers, so every one must be equal.

Shape legend: N slots, S sequences of a cycle and the null slot, R of them may choose tokens, Q most drafts and one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import PagePlace, PageTables, SequenceTables
from gemray_kernels.table import REFERENCE_ROWS, RowKernels
from support.kernels.kernel_parity import poisoned_memory

VOCAB = 7
"""Few ids, so that drafts are right by chance."""


@dataclass(frozen=True)
class RowCase:
    """Sequences somewhere in their texts, and what a host that does not know where has granted them."""

    tables: SequenceTables
    pages: PageTables
    granted_S6: Tensor
    num_drafting: int
    num_choosing: int
    max_drafts: int
    num_rows: int
    num_block_rows: int
    num_outputs: int
    chosen_RQ: Tensor
    states_NH: Tensor
    rows_TH: Tensor

    @property
    def null_slot(self) -> int:
        return self.tables.null_slot


def random_case(seed: int, device: str, *, num_slots: int = 9, max_drafts: int = 4, length: int = 90) -> RowCase:
    """Drafting sequences, others, prompt chunks, padding; some at their ends, some short of room."""
    rng = random.Random(seed)
    torch_rng = torch.Generator().manual_seed(seed)
    slots = rng.sample(range(num_slots), rng.randint(1, num_slots - 1))
    drafting = rng.randint(0, len(slots))
    choosing = rng.randint(drafting, len(slots))
    computed, end, granted = torch.zeros(num_slots + 1), torch.zeros(num_slots + 1), []
    for i, slot in enumerate(slots):
        known = rng.randint(1, 20) if i >= choosing else (1 if i < drafting else rng.choice((1, 3)))
        drafts = rng.randint(1, max_drafts) if i < drafting else 0
        computed[slot] = rng.randint(0, length - known - max_drafts - 2)
        # A sequence that chooses may have reached its end, or be near it.
        end[slot] = int(computed[slot]) + known + (rng.choice((0, 1, 2, 30)) if i < choosing else rng.randint(0, 9))
        outputs = 1 if i < choosing else rng.choice((0, 0, rng.randint(0, known)))
        granted.append((slot, known, drafts, int(i < choosing), i % 2, outputs))
    padding = rng.randint(0, 2)
    if padding and choosing == len(slots):  # a bucket with more room than sequences
        drafting, choosing = drafting + padding * (drafting > 0), choosing + padding
    granted += [(num_slots, 0, 0, 0, 0, 0)] * (1 + padding)
    sizes = [(16, -(-length // 16)), (4, -(-length // 4)), (8, -(-length // 8))]
    places, first = [], 5
    for size, width in sizes:
        places.append(PagePlace(first, width, size))
        first += (num_slots + 1) * width
    pages = torch.randint(0, 1000, (first,), generator=torch_rng, dtype=torch.int32)
    for place in places:  # the null slot has the null page alone
        last = place.first_cell + num_slots * place.width
        pages[last : last + place.width] = 0
    num_rows = sum(known + drafts for _, known, drafts, *_ in granted) + rng.choice((0, 0, 1, 40))
    num_drafts = max((drafts for _, _, drafts, *_ in granted), default=0)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, VOCAB, shape, generator=torch_rng).to(device)

    chosen_RQ = ids(choosing, num_drafts + 1)
    chosen_RQ[torch.rand(chosen_RQ.shape, generator=torch_rng).to(device) < 0.05] = -1
    return RowCase(
        tables=SequenceTables(ids(num_slots + 1, length), computed.long().to(device), end.long().to(device)),
        pages=PageTables.of(pages.to(device), places[: rng.randint(1, 3)]),
        granted_S6=torch.tensor(granted, dtype=torch.int64, device=device),
        num_drafting=drafting,
        num_choosing=choosing,
        max_drafts=num_drafts,
        num_rows=num_rows,
        num_block_rows=max(1, sum(1 + drafts for _, _, drafts, *_ in granted if drafts) + rng.choice((0, 7))),
        num_outputs=sum(drafts + outputs for _, _, drafts, _, _, outputs in granted) + rng.choice((0, 0, 1, 40)),
        chosen_RQ=chosen_RQ,
        states_NH=torch.randn(num_slots + 1, 40, generator=torch_rng).to(device),
        rows_TH=torch.randn(num_rows, 40, generator=torch_rng).to(device),
    )


def cycle_of(kernels: RowKernels, case: RowCase) -> dict[str, Any]:
    """All that the row kernels make of a case, one after the other; the case's tables stay as they are."""
    tables = replace(
        case.tables, token_ids_NL=case.tables.token_ids_NL.clone(), computed_N=case.tables.computed_N.clone()
    )
    states_NH = case.states_NH.clone()
    found: dict[str, Any] = {}
    cut_5A = found["cut_rows"] = kernels.cut_rows(case.granted_S6, tables)
    if case.num_drafting:
        queries = found["query_rows"] = kernels.query_rows(
            cut_5A, tables, case.pages, num_drafting=case.num_drafting, num_drafts=case.max_drafts, delta=-1
        )
        position_D = queries.draft_position_KD[-1].clone()
        drafted = case.chosen_RQ[: case.num_drafting, -1].contiguous()
        found["write_drafts"] = kernels.write_drafts(drafted, queries.slot_D.clone(), position_D, tables)
        found["pack_rows, blocks"] = kernels.pack_rows(
            cut_5A,
            tables,
            case.pages,
            num_rows=case.num_block_rows,
            rectangle=(case.num_drafting, case.max_drafts),
            block_mask=VOCAB,
        )
    layout = found["pack_rows"] = kernels.pack_rows(
        cut_5A,
        tables,
        case.pages,
        num_rows=case.num_rows,
        rectangle=(case.num_choosing, case.max_drafts + 1),
        block_mask=None,
    )
    output_cut_5A = found["cut_to_outputs"] = kernels.cut_to_outputs(cut_5A, case.granted_S6)
    outputs = kernels.pack_rows(
        output_cut_5A,
        tables,
        case.pages,
        num_rows=case.num_outputs,
        rectangle=(case.num_choosing, case.max_drafts + 1),
        block_mask=None,
    )
    found["output_places"] = kernels.output_places(
        cut_5A, output_cut_5A, layout.first_A, outputs.sequence_T, outputs.offset_T, case.num_rows
    )
    settled = found["settle"] = kernels.settle(cut_5A, case.chosen_RQ, tables)
    found["committed_places"] = kernels.committed_places(
        layout.kv_index_GT, layout.sequence_T, layout.offset_T, cut_5A, settled.accepted_A
    )
    kernels.keep_last_rows(case.rows_TH, cut_5A, layout.first_A, settled.accepted_A, states_NH)
    kernels.advance(cut_5A, settled.accepted_A, tables)
    # What the null slot holds is never read, or read as anything.
    found["tokens"], found["states"] = tables.token_ids_NL[:-1], states_NH[:-1]
    found["computed"] = tables.computed_N
    made_up = settled.accepted_A[: case.num_choosing].clone(), settled.ids_RQ.clone()
    found["settle, verified before"] = kernels.settle(cut_5A, case.chosen_RQ, tables, made_up)
    return found


def row_differences(kernels: RowKernels, device: str, seeds: range) -> list[tuple[int, str]]:
    """(seed, name) of every result that is not the reference's."""
    wrong = []
    for seed in seeds:
        case = random_case(seed, device)
        with poisoned_memory():
            found = dict(_tensors(cycle_of(kernels, case)))
        expected = dict(_tensors(cycle_of(REFERENCE_ROWS, case)))
        assert found.keys() == expected.keys()
        wrong += [(seed, name) for name in expected if not torch.equal(found[name], expected[name])]
        # Triton compiles another program for a pointer that is not.
        wrong += [(seed, f"{name} is not aligned") for name, tensor in found.items() if tensor.data_ptr() % 16]
    return wrong


def _tensors(found: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from _tensors(value, key)
    elif isinstance(found, tuple):
        for i, value in enumerate(found):
            yield from _tensors(value, f"{name}[{i}]")
    elif is_dataclass(found):
        for field in fields(found):
            yield from _tensors(getattr(found, field.name), f"{name}.{field.name}")


def layouts_accepted(kernels: RowKernels, device: str) -> list[str]:
    """Names of arguments that a kernel takes although they lie in memory as it does not read them."""
    case = random_case(0, device)
    cut_5A = REFERENCE_ROWS.cut_rows(case.granted_S6, case.tables)
    spread = torch.empty(5, 2 * cut_5A.shape[1], dtype=torch.int64, device=device)[:, ::2]
    tokens = SequenceTables(case.tables.token_ids_NL.t(), case.tables.computed_N, case.tables.end_N)
    numbers = torch.zeros(8, dtype=torch.int64, device=device)
    pack: dict[str, Any] = {"num_rows": case.num_rows, "rectangle": (1, 1), "block_mask": None}
    calls: dict[str, Callable[[], object]] = {
        "cut_rows granted": lambda: kernels.cut_rows(case.granted_S6.t().contiguous().t(), case.tables),
        "pack_rows cut": lambda: kernels.pack_rows(spread, case.tables, case.pages, **pack),
        "pack_rows tokens": lambda: kernels.pack_rows(cut_5A, tokens, case.pages, **pack),
        "cut_to_outputs granted": lambda: kernels.cut_to_outputs(cut_5A, case.granted_S6.t().contiguous().t()),
        "output_places offset": lambda: kernels.output_places(
            cut_5A, cut_5A, numbers, numbers[:4], numbers[::2], case.num_rows
        ),
        "settle chosen": lambda: kernels.settle(cut_5A, case.chosen_RQ.t().contiguous().t()[:, ::2], case.tables),
        "write_drafts ids": lambda: kernels.write_drafts(numbers[::2], numbers[:4], numbers[:4], case.tables),
        "keep_last_rows rows": lambda: kernels.keep_last_rows(
            case.rows_TH.t(), cut_5A, numbers, numbers[: cut_5A.shape[1]], case.states_NH
        ),
        "committed_places offset": lambda: kernels.committed_places(
            numbers[None, :4], numbers[:4], numbers[::2], cut_5A, numbers
        ),
    }
    accepted = []
    for name, call in calls.items():
        try:
            call()
        except ValueError:
            continue
        accepted.append(name)
    return accepted
