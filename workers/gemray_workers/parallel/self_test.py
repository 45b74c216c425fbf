"""A start-up check that the gang's collectives compute what they say.

Shape legend: R ranks (TP), N elements.

A broken all-reduce (a custom kernel, a bad driver) yields fluent gibberish, not an error. So each gang reduces
random data once and compares it with the sum of the same data gathered through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_workers.errors import CommunicationError
from gemray_workers.parallel.communicator import Communicator

SELF_TEST_SIZES = (1, 1021, 32768)
"""Elements: one, a count that no rank number divides, and a message of a decode step."""


def self_test(comm: Communicator, *, device: torch.device | str, dtypes: Sequence[torch.dtype]) -> None:
    """Check `all_reduce` on `device` in each dtype: right sums, equal bits on all ranks.

    Every rank comes to the same verdict, since each judges all ranks' results.

    Raises:
        CommunicationError: naming the ranks whose results are wrong, the dtype and the difference.
    """
    for dtype in dtypes:
        for count in SELF_TEST_SIZES:
            _check_all_reduce(comm, torch.device(device), dtype, count)


def _check_all_reduce(comm: Communicator, device: torch.device, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(84 + comm.rank)
    mine_N = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    # Gathered before the reduction, which may reuse its input; through host memory, apart from the device's path.
    inputs_RN = comm.all_gather(mine_N.clone()).double()
    results_RN = comm.all_gather(comm.all_reduce(mine_N.to(device)).cpu())

    error_RN = (results_RN.double() - inputs_RN.sum(0)).abs()
    # Each of the R - 1 additions rounds a partial sum, which is at most the sum of magnitudes.
    allowed_N = torch.finfo(dtype).eps * comm.size * inputs_RN.abs().sum(0)
    wrong = _rows_where(~(error_RN <= allowed_N))  # a NaN is wrong too
    if wrong:
        raise CommunicationError(
            f"all_reduce of {count} {dtype} values on {device.type} is wrong on rank {_listed(wrong)} of {comm.size}: "
            f"off by up to {error_RN[wrong].max().item():.3g}, rounding allows {allowed_N.max().item():.3g}"
        )
    unlike = _rows_where(results_RN != results_RN[0])
    if unlike:
        difference = (results_RN.double() - results_RN[0].double()).abs().max().item()
        raise CommunicationError(
            f"all_reduce of {count} {dtype} values on {device.type} gives rank {_listed(unlike)} of {comm.size} "
            f"other bits than rank 0: they differ by up to {difference:.3g}"
        )


def _rows_where(mask_RN: Tensor) -> list[int]:
    return [int(rank) for rank in mask_RN.any(1).nonzero().flatten()]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
