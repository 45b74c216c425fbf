"""The self-test of a gang's collectives at start: passes on gloo, and names the rank and collective at fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_workers.errors import CommunicationError
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.self_test import self_test
from support.processes.gang import RunOnGang

SIZES = [1, 2, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class FaultyCommunicator:
    """A communicator whose all_reduce is spoilt on one rank."""

    def __init__(self, comm: Communicator, faulty_rank: int, dtype: torch.dtype, fault: float) -> None:
        self._comm = comm
        self._fault = fault if comm.rank == faulty_rank else 0.0
        self._dtype = dtype
        self.rank = comm.rank
        self.size = comm.size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = self._comm.all_reduce(x)
        if x.dtype == self._dtype and self._fault:
            x[-1] += self._fault if self._fault == self._fault else torch.nan
        return x

    def all_reduce_tree(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        return self._comm.all_reduce_tree(parts, dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        return self._comm.broadcast_bytes(payload)

    def barrier(self) -> None:
        self._comm.barrier()


def run_self_test(comm: Communicator) -> None:
    self_test(comm, device="cpu", dtypes=DTYPES)


def self_test_with_fault(comm: Communicator, faulty_rank: int, dtype: torch.dtype, fault: float) -> str:
    try:
        run_self_test(FaultyCommunicator(comm, faulty_rank, dtype, fault))
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("size", SIZES)
def test_self_test_passes_on_gloo(run_on_gang: RunOnGang, size: int) -> None:
    run_on_gang(size, run_self_test)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_self_test_names_the_faulty_rank(run_on_gang: RunOnGang, dtype: torch.dtype) -> None:
    for verdict in run_on_gang(4, self_test_with_fault, 2, dtype, 0.75):
        assert f"all_reduce of 1 {dtype} values on cpu is wrong on rank 2 of 4: off by up to 0.7" in verdict


def test_self_test_catches_nan(run_on_gang: RunOnGang) -> None:
    for verdict in run_on_gang(2, self_test_with_fault, 0, torch.float32, float("nan")):
        assert "is wrong on rank 0 of 2: off by up to nan" in verdict


def test_self_test_catches_bits_that_rounding_would_excuse(run_on_gang: RunOnGang) -> None:
    for verdict in run_on_gang(4, self_test_with_fault, 3, torch.float64, 1e-16):
        assert "gives rank 3 of 4 other bits than rank 0" in verdict
