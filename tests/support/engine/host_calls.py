"""How many operations the host starts in a steady step; ``python -m support.engine.host_calls`` prints a table.

Counted on a CPU, where the references of the kernels are many operations each: a call of a kernel counts as one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gemray_kernels.reference.token_choice import ReferenceKernels
from gemray_kernels.table import REFERENCE, REFERENCE_ROWS
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.execution import slots
from gemray_workers.messages import Submit
from gemray_workers.model import weight_sharding
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank import target_rank
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling import state
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request

PUBLISHED = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": (5, 9)}
DRAFTERS: dict[str, Any] = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}
DRAFTS = 4
READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}
"""Operations for which the host waits for the device."""


class CountOperations(TorchDispatchMode):
    """Counts calls of kernels, and whatever else reaches torch and computes; views cost no launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


class AsOne:
    """A table of kernels each of which counts as one operation, by its name."""

    def __init__(self, kernels: Any, newest: list[CountOperations]) -> None:
        """`newest` holds what counts now, if anything does."""
        self._kernels = kernels
        self._newest = newest

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)
        if not callable(kernel):
            return kernel

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._newest:
                return kernel(*args, **kwargs)
            self._newest[-1].count[name] += 1
            with _disable_current_modes():
                return kernel(*args, **kwargs)

        return called


def one_operation(q_TND: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands for the attention kernel, one launch on a card; the reference loops over sequences."""
    return q_TND.clone()


def steady_steps(method: str, batch: int, lag: int, steps: int = 3) -> list[Counter[str]]:
    """Operations of steps in a row, all sequences decoding with the published defaults."""
    directory = tiny_checkpoint("31B")
    make = DRAFTERS[method]
    drafter = {} if make is None else {"drafter_path": str(make(directory)), "num_draft_tokens": DRAFTS}
    config = engine_config(
        directory,
        max_num_seqs=batch,
        max_step_tokens=16 * batch,
        page_size=64,
        lag=lag,
        kv_memory_bytes=1 << 28,
        **drafter,
    )
    submits: list[Submit] = [request(str(i), [5 + i, 6, 7], 40, seed=i, **PUBLISHED) for i in range(batch)]
    counting: list[CountOperations] = []
    with (
        patch.object(target_rank, "attention_kernel", lambda *_: one_operation),
        patch.object(weight_sharding, "kernels_for", lambda *_: AsOne(REFERENCE, counting)),
        patch.object(state, "choice_kernels", lambda *_: AsOne(ReferenceKernels(), counting)),
        patch.object(slots, "row_kernels_for", lambda *_: AsOne(REFERENCE_ROWS, counting)),
    ):
        engine = EngineRank(config, SoloCommunicator(), torch.device("cpu")).engine(LocalInbox(submits))
        for _ in range(3):
            engine.step()
        counts = []
        for _ in range(steps):
            counting.append(CountOperations())
            with counting[-1] as counted:
                engine.step()
            counting.clear()
            counts.append(counted.count)
    return counts


def main() -> None:
    """A row a drafter, lag and batch."""
    print("| drafter | lag | batch | operations of a step | of them reads of the device |")
    print("| --- | --- | --- | --- | --- |")
    for method in DRAFTERS:
        for lag in (0, 1):
            for batch in (1, 32):
                count = steady_steps(method, batch, lag)[0]
                reads = sum(count[name] for name in READS)
                print(f"| {method} | {lag} | {batch} | {count.total()} | {reads} |")


if __name__ == "__main__":
    main()
