"""Memory of a gang's devices that they read from each other, for collectives of one kernel.

Shape legend: R ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store

if TYPE_CHECKING:
    from gemray_kernels.triton.one_shot_reduce import OneShotReduce

Agree = Callable[[str | None], str | None]
"""Called by every rank at the same place with its error, if it has one; returns the error of the first rank that has
one."""


class OneShotUnavailable(Exception):
    """The devices cannot read each other's memory; the message says why."""


def one_shot_reduce(store: Store, rank: int, size: int, device: torch.device, name: str, agree: Agree) -> OneShotReduce:
    """Lay out buffers and flags on every rank's device, and map every other rank's. Every rank calls this.

    Uses torch's symmetric memory, which knows a group by a name that this registers: the gang's have none.

    Args:
        store: that all ranks see, and nothing else uses.
        rank: this one.
        size: how many ranks there are.
        device: this rank's CUDA device.
        name: of the group, new in this process.
        agree: see `Agree`.

    Raises:
        OneShotUnavailable: on every rank, when one of them cannot.
    """
    # Each worker may see its own device alone, as number 0; and links that reduce by themselves are not used.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

    def on_all(step: Callable[[], None]) -> None:
        trouble = None
        try:
            step()
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            trouble = f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if (found := agree(trouble)) is not None:
            raise OneShotUnavailable(found)

    found: list[OneShotReduce] = []
    memory: list[torch.Tensor] = []
    group = ProcessGroup(store, rank, size)  # only a name for the store: it has no backend

    def allocate() -> None:
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        from gemray_kernels.triton.one_shot_reduce import memory_words

        named: Any = name  # a type of its own in newer versions of torch
        group._set_group_name(named)
        _register_process_group(named, group)
        _SymmetricMemory.set_group_info(name, rank, size, store)
        whole = _SymmetricMemory.empty_strided_p2p((memory_words(size),), (1,), torch.int32, device)
        whole.zero_()
        torch.cuda.synchronize(device)
        memory.append(whole)

    def connect() -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        from gemray_kernels.triton.one_shot_reduce import OneShotReduce

        handle = _SymmetricMemory.rendezvous(memory[0], name)
        memory_R = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        found.append(OneShotReduce(rank, size, memory_R, keep=(memory[0], handle, group)))

    on_all(allocate)
    on_all(connect)
    return found[0]
