"""A target small enough for its law to be known, in a real engine: the next token depends on the last one alone.

Everything but the model is the engine's own: scheduler, slots, drafts, verification, noise.

Shape legend: T rows, U of them whose output is used, V vocabulary, D sequences that draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.build import EngineParts, Schedule, build_engine, build_slots
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import Submit
from gemray_workers.model.batch import ForwardBatch, ForwardOutput, OutputRows
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.scheduling.scheduler import SchedulerConfig
from support.engine.engine_runner import Run, collect
from support.oracles.oracle import CPU

MAX_LEN = 24


class ToyTarget:
    """Logits are a row of a table."""

    device = CPU

    def __init__(self, table_VV: Tensor) -> None:
        """`table_VV` [last token, next token], float64."""
        self.table_VV = table_VV
        self.shard = ShardIndices.of_rank(0, 1, org_vocab_size=table_VV.shape[0])

    def forward(
        self,
        batch: ForwardBatch,
        _caches: object,
        capture: tuple[int, ...] = (),
        outputs: OutputRows | None = None,
    ) -> ForwardOutput:
        token_ids_U = batch.token_ids_T if outputs is None else batch.token_ids_T[outputs.place_U]
        one_hot_UV = torch.nn.functional.one_hot(token_ids_U, self.table_VV.shape[0])
        return ForwardOutput(hidden_UH=one_hot_UV.to(self.table_VV.dtype), captured_TFH=None)

    softcap = None

    def capped(self, uncapped_TV: Tensor) -> Tensor:
        return uncapped_TV

    def uncapped_logits(self, hidden_TV: Tensor) -> Tensor:
        return local_columns(hidden_TV @ self.table_VV, self.shard)


def local_columns(logits_TV: Tensor, shard: ShardIndices) -> Tensor:
    """Columns as a rank has them, padding at -inf."""
    ids = shard.global_ids()
    return logits_TV[:, ids.clamp(min=0)].masked_fill(ids < 0, -torch.inf)


class TableDrafter:
    """Drafts from a table of its own, one token after the other, as a request samples or greedily."""

    weight_bytes = 0

    def __init__(self, target: ToyTarget, table_VV: Tensor, *, greedy: bool) -> None:
        """
        Args:
            target: whose vocabulary it has.
            table_VV: its own logits; the closer to the target's, the more is accepted.
            greedy: argmax whatever the request samples, instead of the request's own noise.
        """
        self._table_VV = table_VV
        self._shard = target.shard
        self._chooser: Any = DraftChooser(SoloCommunicator())
        self._greedy = greedy

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        num_drafting = rows.shape.num_drafting
        slot_D = rows.slot_A[:num_drafting]
        for i in range(rows.shape.max_drafts):
            position_D = rows.start_A[:num_drafting] + 1 + i
            last_D = slots.token_ids_NL[slot_D, position_D - 1]
            logits_DV = local_columns(self._table_VV[last_D], self._shard)
            if self._greedy:
                ids_D = self._shard.global_ids()[logits_DV.argmax(-1)]
            else:
                ids_D = self._chooser.choose(logits_DV, slot_D, position_D, slots.sampling, rows.plan.features)
            slots.token_ids_NL[slot_D, position_D] = ids_D

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        """Nothing is kept."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""


def run_toy(target: ToyTarget, drafter: Drafter, submits: list[Submit], *, num_draft_tokens: int, lag: int = 1) -> Run:
    """Serve `submits` with the toy."""
    num_slots = len(submits)
    specs = [KVGroupSpec("toy", (), 1, 1, 8, None, torch.float64)]
    comm = SoloCommunicator()
    inbox = LocalInbox(submits)
    scheduler = SchedulerConfig(
        max_num_seqs=num_slots,
        max_step_tokens=num_slots * (1 + num_draft_tokens),
        prefill_chunk=8,
        max_model_len=MAX_LEN,
        num_draft_tokens=num_draft_tokens,
        lag=lag,
    )
    model: Any = target
    caches: Any = None
    slots = build_slots(scheduler, specs, target.shard, torch.float64, CPU)
    build_engine(
        EngineParts(model, comm, caches, slots, drafter), Schedule(scheduler, specs, {"toy": num_slots * 4}), inbox
    ).run()
    return collect(inbox, submits)
