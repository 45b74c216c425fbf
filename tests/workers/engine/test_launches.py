"""What a steady step launches on a card: how many kernels a layer has, and how few operations lie around the layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank import target_rank
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request
from support.engine.launches import Launches

DENSE = Counter(
    {"summands": 3, "attention_inputs": 1, "attention": 1, "add_then_norms": 2, "gelu_linear": 1},
)
LAYERS: dict[Shape, Counter[str]] = {
    "31B": DENSE,
    "26B-A4B": DENSE
    + Counter({"wide_summands": 1, "route": 1, "expert_outputs": 1, "add_experts_then_norms": 1})
    - Counter({"add_then_norms": 1}),
    "E4B": DENSE + Counter({"summands": 1, "gated_projection": 1, "add_then_norms": 1}),
}
"""Calls of one layer. On a card attention is one launch or two, few rows' experts are two, the rest one."""
DRAFTS = 4


def steady_step(shape: Shape, method: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of a step that is the same as the one before, but the drafter's layers."""
    launches = Launches()
    launches.install(monkeypatch)

    def attention(q_TND: Tensor, *_: Any, **__: Any) -> Tensor:
        return q_TND.clone()

    counted = launches.called("attention", attention)
    monkeypatch.setattr(target_rank, "attention_kernel", lambda *_: counted)
    directory: Path = tiny_checkpoint(shape)
    path = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}[method]
    drafter = {} if path is None else {"drafter_path": str(path(directory)), "num_draft_tokens": DRAFTS}
    config = engine_config(directory, max_num_seqs=16, max_step_tokens=256, page_size=64, **drafter)
    submits = [request(str(i), [5 + i, 6, 7], 40, seed=i) for i in range(4)]
    rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    engine = rank.engine(LocalInbox(submits))
    for _ in range(4):
        engine.step()
    launches.clear()
    with launches:
        engine.step()
    return +launches.count


def around(count: Counter[str], layers: Counter[str], num_layers: int) -> Counter[str]:
    """What is left without so many layers; fails where there are fewer."""
    for name, number in layers.items():
        count[name] -= number * num_layers
    assert min(count.values()) >= 0, count
    return +count


@pytest.mark.parametrize(("shape", "num_layers"), [("31B", 6), ("26B-A4B", 6), ("E4B", 9)])
def test_a_plain_step_has_few_kernels_around_its_layers(
    shape: Shape, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = around(steady_step(shape, "none", monkeypatch), LAYERS[shape], num_layers)
    assert not [name for name in left if name.startswith("aten.") and name != "aten.index.Tensor"]
    assert left["cut_rows"] == left["pack_rows"] == left["settle"] == left["advance"] == 1
    assert left["rope_tables"] == 1
    assert left.total() <= (14 if shape == "E4B" else 11), left


def test_a_draft_of_mtp_has_few_kernels_around_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    left = around(steady_step("31B", "mtp", monkeypatch), DENSE, 6 + 4 * DRAFTS)
    assert left["rope_tables"] == 2, "angles of a round are computed once"
    assert left.total() <= 12 * (1 + DRAFTS), left


def test_a_block_of_dflash_has_few_kernels_around_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    left = around(steady_step("31B", "dflash", monkeypatch), DENSE, 6)
    # Per layer: eight of a block's pass, two that make keys of context.
    block = Counter({"summands": 3, "attention_inputs": 2, "attention": 1, "add_then_norms": 2, "silu_linear": 1})
    left = around(left, block, 3)
    assert left.total() <= 12 * 3, left
