"""Torch's process groups, gloo and NCCL, as far as a communicator uses them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)


class ProcessGroup(Protocol):
    """What torch's gloo and NCCL backends share, as far as it is used here (torch's stubs leave it out)."""

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> Work | None:
        """Sum each tensor over ranks, in place."""

    def _allgather_base(self, output: Tensor, input: Tensor, opts: AllgatherOptions) -> Work | None: ...

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions,
    ) -> Work | None:
        """Send each rank its share of `input`; even shares where no sizes are given."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Fill the tensor with `root`'s."""

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Work:
        """Send one tensor to a rank that receives it."""

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Fill one tensor with what `source` sends."""

    def barrier(self) -> Work:
        """Wait for every rank."""

    def shutdown(self) -> None:
        """Leave in order."""

    def abort(self) -> None:
        """Give up what is in flight."""

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


class _SilentGroup:
    """A group that exchanges nothing."""

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> None: ...

    def _allgather_base(self, output: Tensor, input: Tensor, opts: AllgatherOptions) -> None: ...

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions,
    ) -> None: ...

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> None: ...

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> None: ...


def silent_group() -> ProcessGroup:
    """A stand-in whose collectives leave their tensors as they are."""
    return cast(ProcessGroup, _SilentGroup())


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """gloo among the ranks of `store`, for tensors in host memory."""
    return cast(ProcessGroup, ProcessGroupGloo(PrefixStore("host", store), rank, size, timeout))


def nccl_group(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> ProcessGroup:
    """NCCL among the ranks of `store` for tensors of this CUDA device, connected before the first collective."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from torch built for CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = ProcessGroupNCCL(PrefixStore("device", store), rank, size, options)
    index = torch.cuda.current_device() if device.index is None else device.index
    group.eager_connect_single_device(torch.device("cuda", index))
    return cast(ProcessGroup, group)


def finish(work: Work | None) -> None:
    """Finish a gloo operation; NCCL ones queued on the current stream return nothing to wait for."""
    if work is not None:
        work.wait()
