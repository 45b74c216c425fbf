"""A gang's communicator over torch.distributed: gloo for host memory, NCCL for CUDA tensors.

The process groups are built on a store of their own and never registered as torch's default group, so one process
can join gangs one after another (a rebuilt gang) or side by side (tests).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    Store,
)

from gemray_kernels.numerics import is_tree, tree_sum
from gemray_workers.errors import CommunicationError, InvalidField
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.exchanges import ExchangeCount, Exchanges
from gemray_workers.parallel.process_group import ProcessGroup, finish, gloo_group, nccl_group, silent_group
from gemray_workers.parallel.rendezvous import JoinDeadline, absent_at, meet
from gemray_workers.parallel.symmetric_memory import one_shot_reduce

if TYPE_CHECKING:
    from gemray_kernels.triton.one_shot_reduce import OneShotReduce

_HEADER_BYTES = 8
_INLINE_BYTES = 4096
"""Largest payload that `broadcast_bytes` sends in its first and only broadcast."""
_TROUBLE_BYTES = 400
_GATHERED_BYTES = 1 << 18
"""Largest tensor that `all_reduce_tree` gathers whole; of a larger one each rank adds up a share."""


class TorchCommunicator:
    """`Communicator` of one rank. Build it with `join_gang`; CUDA tensors go over NCCL, all others over gloo."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        host: ProcessGroup,
        device: ProcessGroup,
        torch_device: torch.device,
        timeout: timedelta,
        name: str = "gang",
    ) -> None:
        self._exchanges = ExchangeCount(name)
        self._torch_device = torch_device
        self._timeout = timeout
        self._rank = rank
        self._size = size
        self._one_shot: OneShotReduce | None = None
        self._store: Store | None = store  # the groups need rank 0's store as long as they live
        self._subgroups: Counter[str] = Counter()
        self._within: list[TorchCommunicator] = []
        """Subgroups that this rank is in."""
        self._host = host
        self._device = device
        self._all_reduce_options = AllreduceOptions()
        self._all_gather_options = AllgatherOptions()
        self._exchange_options = AllToAllOptions()
        # On CUDA the current stream carries the collective itself: no second stream, nothing to wait for.
        self._all_reduce_options.asyncOp = False
        self._all_gather_options.asyncOp = False
        self._exchange_options.asyncOp = False
        self._inline = torch.zeros(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        self._inline_bytes = self._inline.numpy().data

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the gang has."""
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place when `x` is contiguous.

        Ring and tree reductions compute each element on one rank and pass the result on, so ranks hold equal bits;
        `self_test` asserts it at start-up. CUDA tensors of a few MiB go through one kernel once `use_one_shot` was
        called, which adds in one order on every rank.
        """
        x = x.contiguous()
        if x.numel() == 0:
            return x
        if self._one_shot is not None and x.is_cuda and self._one_shot.takes(x):
            return self._one_shot(x)
        with self._collective("all_reduce"):
            finish(self._group_of(x).allreduce([x], self._all_reduce_options))
        return x

    def all_reduce_tree(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of all ranks' parts by the tree: in one kernel where `use_one_shot` was called and a part is small,
        else over what is gathered, or of a large one share by share on every rank."""
        if not is_tree(self._size):
            raise ValueError(f"{self._size} ranks, which no tree adds up: a power of two is allowed")
        parts = parts.contiguous()
        if self._one_shot is not None and parts.is_cuda and self._one_shot.takes(parts[0]):
            return self._one_shot.of_parts(parts, dtype)
        x = tree_sum(parts)
        if x.nbytes <= _GATHERED_BYTES:
            return tree_sum(self.all_gather(x)).to(dtype)
        padding = -x.numel() % self._size
        shares = torch.nn.functional.pad(x.view(-1), (0, padding)).view(self._size, -1) if padding else x
        gathered = torch.empty_like(shares)
        with self._collective("exchange"):
            finish(self._group_of(x).alltoall_base(gathered.view(-1), shares.view(-1), [], [], self._exchange_options))
        share = tree_sum(gathered.view(self._size, -1)).to(dtype)
        return self.all_gather(share).view(-1)[: x.numel()].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` in rank order: [size, *x.shape]."""
        gathered = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        if gathered.numel() == 0:
            return gathered
        with self._collective("all_gather"):
            finish(self._group_of(x)._allgather_base(gathered.view(-1), x.reshape(-1), self._all_gather_options))
        return gathered

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank: one gloo broadcast up to 4 KiB, a second one beyond."""
        if self._rank == 0:
            if payload is None:
                raise ValueError("rank 0 must give a payload to broadcast")
            self._inline_bytes[:_HEADER_BYTES] = len(payload).to_bytes(_HEADER_BYTES, "little")
            if len(payload) <= _INLINE_BYTES:
                self._inline_bytes[_HEADER_BYTES : _HEADER_BYTES + len(payload)] = payload
        elif payload is not None:
            raise ValueError(f"rank {self._rank} gave a payload to broadcast: only rank 0 does")
        self._broadcast(self._inline)
        length = int.from_bytes(self._inline_bytes[:_HEADER_BYTES], "little")
        if length <= _INLINE_BYTES:
            return bytes(self._inline_bytes[_HEADER_BYTES : _HEADER_BYTES + length])
        body = torch.empty(length, dtype=torch.uint8)
        if payload is not None:
            body.numpy().data[:] = payload
        self._broadcast(body)
        return payload if payload is not None else body.numpy().tobytes()

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to one rank, which must `receive` a tensor of its shape and dtype."""
        with self._collective("send", by_all=False):
            finish(self._group_of(x).send([x.contiguous()], to, 0))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill `x` with what `source` sends; on CUDA the current stream waits, not the host."""
        with self._collective("receive", by_all=False):
            finish(self._group_of(x).recv([x], source, 0))
        return x

    def subgroup(self, size: int, name: str) -> Communicator:
        """The first `size` ranks as a group of their own; each of them calls this, the others do not."""
        if self._store is None or self._rank >= size:
            raise ValueError(f"rank {self._rank} is not among the first {size} ranks of an open gang")
        if size == 1:
            return SoloCommunicator()
        # A name may come again: under the old one's keys the new group would look for ranks where they were.
        self._subgroups[name] += 1
        store = PrefixStore(f"{name}-{self._subgroups[name]}", self._store)
        host = gloo_group(store, self._rank, size, self._timeout)
        over_nccl = self._device is not self._host
        tensors = nccl_group(store, self._rank, size, self._torch_device, self._timeout) if over_nccl else host
        within = TorchCommunicator(self._rank, size, store, host, tensors, self._torch_device, self._timeout, name)
        self._within.append(within)
        return within

    def set_timeout(self, timeout_s: float) -> None:
        """Let collectives that are called from now on wait so long for their peers, those of subgroups too."""
        self._timeout = timedelta(seconds=timeout_s)
        for group in {id(group): group for group in (self._host, self._device)}.values():
            group._set_default_timeout(self._timeout)
        for within in self._within:
            within.set_timeout(timeout_s)

    def use_one_shot(self, device: torch.device) -> None:
        """Reduce small tensors of this CUDA device in one kernel from now on; every rank calls this with its own.

        Raises:
            OneShotUnavailable: on every rank, when one of them cannot. The communicator goes on as before.
        """
        if self._store is None:
            raise ValueError(f"rank {self._rank} has left the gang")
        self._subgroups["one-shot"] += 1
        # Torch keeps a group's name for a process's life, and each rank may have called its own.
        name = self.broadcast_bytes(uuid4().bytes if self._rank == 0 else None).hex()
        store = PrefixStore(f"one-shot-{self._subgroups['one-shot']}", self._store)
        self._one_shot = one_shot_reduce(store, self._rank, self._size, device, name, self._first_trouble)
        self.barrier()

    def drop_one_shot(self) -> None:
        """Reduce everything by the group's own collective again; every rank calls this."""
        self._one_shot = None

    def _first_trouble(self, trouble: str | None) -> str | None:
        mine = torch.zeros(_TROUBLE_BYTES, dtype=torch.uint8)
        if trouble is not None:
            text = trouble.encode()[:_TROUBLE_BYTES]
            mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        for row in self.all_gather(mine):
            if row.any():
                return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
        return None

    def exchanges(self) -> list[Exchanges]:
        """How far this rank has come with the collectives of the gang and of its subgroups. Any thread may ask."""
        return [self._exchanges.now(), *(found for within in self._within for found in within.exchanges())]

    def wait_for_all(self, milestone: str, deadline_s: float) -> None:
        """Return when every rank has reached a milestone of the start, of each name once.

        Not a collective: those give up after their timeout, which is meant for a step and too short for loading.
        Raises CommunicationError at the deadline, naming the ranks that are still on their way.
        """
        if self._store is None:
            raise ValueError(f"rank {self._rank} has left the gang")
        started = time.monotonic()
        try:
            absent = absent_at(self._store, milestone, self._rank, self._size, timedelta(seconds=deadline_s))
        except RuntimeError as error:
            waited = time.monotonic() - started
            raise CommunicationError(
                f"rank {self._rank} of {self._size} lost its peers after {waited:.1f} s, waiting until all had "
                f"{milestone}: {error}"
            ) from error
        if absent:
            raise CommunicationError(
                f"rank {', '.join(map(str, absent))} of {self._size} had not {milestone} {deadline_s:g} s after "
                f"rank {self._rank}"
            )

    def barrier(self) -> None:
        """Return when every rank's host thread has arrived (queued CUDA work may still run)."""
        with self._collective("barrier"):
            finish(self._host.barrier())

    def close(self) -> None:
        """Leave the gang in order. A peer's collective that still needs this rank fails."""
        self._host.shutdown()
        if self._device is not self._host:
            self._device.shutdown()
        self._store = None

    def abort(self) -> None:
        """Give up the NCCL collectives in flight, from any thread: GPU work that waits for a dead peer then ends.

        gloo has nothing to abort: its collectives end by themselves when a peer's connection closes, or at their
        deadline.
        """
        if self._device is not self._host:
            self._device.abort()

    def _group_of(self, x: Tensor) -> ProcessGroup:
        return self._device if x.is_cuda else self._host

    def _broadcast(self, buffer: Tensor) -> None:
        with self._collective("broadcast"):
            finish(self._host.broadcast(buffer, 0))

    @contextmanager
    def _collective(self, verb: str, *, by_all: bool = True) -> Iterator[None]:
        started = self._exchanges.begin(verb, by_all=by_all)
        try:
            yield
        except RuntimeError as error:
            waited = time.monotonic() - started
            raise CommunicationError(
                f"{verb} failed on rank {self._rank} of {self._size} after {waited:.1f} s: {error}"
            ) from error
        finally:
            self._exchanges.end()


@contextmanager
def silenced(comm: Communicator | None) -> Iterator[None]:
    """Let no tensor leave this rank meanwhile: what a collective gives has its shape and nobody's numbers. Kernels that
    reduce are launched as ever. None stands for a rank alone."""
    if not isinstance(comm, TorchCommunicator):
        yield
        return
    groups = comm._host, comm._device
    comm._host = comm._device = silent_group()
    try:
        with comm._exchanges.uncounted():
            yield
    finally:
        comm._host, comm._device = groups


def join_gang(
    rank: int,
    size: int,
    rendezvous: str,
    *,
    device: torch.device | str,
    timeout_s: float,
    collective_timeout_s: float | None = None,
) -> TorchCommunicator:
    """Meet the other ranks and connect to them.

    Args:
        rank: this process, 0 <= rank < size. Rank 0 listens at the rendezvous.
        size: how many processes join.
        rendezvous: ``tcp://host:port``, an address of rank 0's node that all ranks reach.
        device: where this rank's tensors live; on ``cuda`` an index chooses the GPU, else the current one is used.
        timeout_s: how long to wait for the others to arrive.
        collective_timeout_s: how long a collective waits for its peers; `timeout_s` when None.

    Raises:
        InvalidField: a rank, size or address that cannot be.
        CommunicationError: naming this rank, the address, the time waited and the ranks that never came.
    """
    if not 0 <= rank < size:
        raise InvalidField("rank", rank, f"0 <= rank < size = {size}")
    if timeout_s <= 0:
        raise InvalidField("timeout_s", timeout_s, "seconds > 0")
    deadline = JoinDeadline(rank, size, rendezvous, timeout_s)
    store = meet(rank, size, rendezvous, deadline)
    collective_timeout = timedelta(seconds=timeout_s if collective_timeout_s is None else collective_timeout_s)
    try:
        host = gloo_group(store, rank, size, collective_timeout)
        over_nccl = torch.device(device).type == "cuda"
        tensors = nccl_group(store, rank, size, torch.device(device), collective_timeout) if over_nccl else host
        communicator = TorchCommunicator(rank, size, store, host, tensors, torch.device(device), collective_timeout)
        communicator.barrier()
    except (RuntimeError, CommunicationError) as error:
        raise deadline.error(error) from error
    return communicator
