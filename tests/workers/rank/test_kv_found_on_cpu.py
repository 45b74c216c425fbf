"""Ranks on a CPU with no memory stated: a quarter of what is free, shared, and everything runs in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemray_workers.rank import control_group
from gemray_workers.rank.memory import GIB, free_bytes, total_bytes
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config
from support.engine.fake_card import MIB
from support.memory_stress.fill import Filled, fill
from support.processes.gang import RunOnGang
from support.waiting import HANG_S

CPU = torch.device("cpu")


def test_two_ranks_share_a_quarter_and_fill_it(run_on_gang: RunOnGang) -> None:
    config = replace(
        engine_config(tiny_checkpoint("31B"), max_model_len=128, tensor_parallel_size=2), kv_memory_bytes=None
    )
    ranks: list[Filled] = run_on_gang(2, fill, config, HANG_S)
    budgets = {filled.memory.kv_budget for filled in ranks}
    assert len(budgets) == 1
    assert 0 < budgets.pop() <= total_bytes(CPU) // 8
    for filled in ranks:
        memory = filled.memory
        assert not filled.faults
        assert filled.max_model_len == 128
        assert memory.kv <= 64 * MIB, "no more than the sequences can use"
        assert memory.total == total_bytes(CPU)
    assert ranks[0].batch == config.max_num_seqs
    assert ranks[0].longest >= 120


def test_the_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own or one around it, whichever leaves less; read files count as free."""
    inner = tmp_path / "cgroup" / "service" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("1:cpu:/elsewhere\n0::/service/inner\n")
    monkeypatch.setattr(control_group, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "OWN_CGROUP", tmp_path / "own")
    unlimited = free_bytes(CPU)
    for group, limit, used in ((inner, "max", 7), (inner.parent, str(GIB), GIB // 2)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 3\ninactive_file {GIB // 8}\nactive_file 1024\n")
    assert free_bytes(CPU) == min(unlimited, GIB // 2 + GIB // 8 + 1024)
    assert total_bytes(CPU) == GIB
    (inner / "memory.max").write_text(f"{GIB // 4}\n")
    (inner / "memory.current").write_text(f"{GIB // 4}\n")
    assert free_bytes(CPU) == GIB // 8 + 1024
    assert total_bytes(CPU) == GIB // 4


@pytest.mark.parametrize("seen", ["service", ""], ids=["on a host", "in a container"])
def test_so_does_one_of_the_first_version(seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees its own group where a host has the root, by a path that leads nowhere in it."""
    group = tmp_path / "cgroup" / "memory" / seen
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("9:cpu,cpuacct:/else\n4:memory:/service/inner\n0::/other\n")
    monkeypatch.setattr(control_group, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "OWN_CGROUP", tmp_path / "own")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB // 2}\n")
    (group / "memory.stat").write_text(f"active_file 1\ntotal_inactive_file {GIB // 8}\ntotal_active_file 1024\n")
    assert total_bytes(CPU) > GIB, "no limit"
    (group / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert free_bytes(CPU) == GIB // 2 + GIB // 8 + 1024
    assert total_bytes(CPU) == GIB
