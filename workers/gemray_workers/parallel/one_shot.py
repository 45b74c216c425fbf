"""The choice between the gang's own all-reduce and the one-kernel one, by trying the latter."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from gemray_workers.errors import CommunicationError
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.self_test import self_test
from gemray_workers.parallel.symmetric_memory import OneShotUnavailable
from gemray_workers.parallel.torch_communicator import TorchCommunicator

logger = logging.getLogger(__name__)


def use_one_shot_if_sound(comm: Communicator, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Let `comm` reduce small tensors in one kernel if the devices can and the sums are right; else warn.

    Every rank calls this and comes to the same choice. Nothing changes for one rank, or on a CPU.
    """
    if not isinstance(comm, TorchCommunicator) or device.type != "cuda":
        return
    try:
        comm.use_one_shot(device)
        self_test(comm, device=device, dtypes=dtypes)
    except (OneShotUnavailable, CommunicationError) as error:
        comm.drop_one_shot()
        logger.warning("all-reduce goes through NCCL, which takes longer for small tensors: %s", error)
