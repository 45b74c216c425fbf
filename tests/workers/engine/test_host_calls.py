"""How many operations the host starts in a steady step: as many for 16 sequences as for one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank import target_rank
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request

PUBLISHED = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": (5, 9)}
DRAFTERS: dict[str, Any] = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}


class CountOperations(TorchDispatchMode):
    """Counts what reaches torch and computes; views cost no launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def one_operation(q_TND: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands for the attention kernel, one launch on a card; the reference loops over sequences."""
    return q_TND.clone()


def steady_step(method: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Operations of the step that is the same as the one before."""
    monkeypatch.setattr(target_rank, "attention_kernel", lambda _choice: one_operation)
    directory = tiny_checkpoint("31B")
    make = DRAFTERS[method]
    drafter = {} if make is None else {"drafter_path": str(make(directory)), "num_draft_tokens": 4}
    config = engine_config(directory, max_num_seqs=16, max_step_tokens=256, page_size=64, **drafter)
    submits: list[Submit] = [request(str(i), [5 + i, 6, 7], 40, seed=i, **PUBLISHED) for i in range(batch)]
    engine = EngineRank(config, SoloCommunicator(), torch.device("cpu")).engine(LocalInbox(submits))
    for _ in range(3):
        engine.step()
    counts = []
    for _ in range(3):
        with CountOperations() as counted:
            engine.step()
        counts.append(counted.count)
    assert counts[0] == counts[1] == counts[2], "steady steps are alike"
    return counts[0]


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
def test_operations_of_a_step_do_not_grow_with_the_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, many = (steady_step(method, batch, monkeypatch) for batch in (1, 16))
    assert many == alone, {name: (alone[name], many[name]) for name in many if many[name] != alone[name]}
    reads = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}
    assert not reads & alone.keys(), "a step reads the device in one place, its result"
