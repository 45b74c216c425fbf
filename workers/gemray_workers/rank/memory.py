"""How much memory a rank will take, told from configs and headers, and how much is free.

Weights and pages are exact up to vocabulary padding; the work space is an estimate on the low side. So what is refused
here could not have run, while a start that barely fits may still run out of memory, with the allocator's message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import psutil
import torch

from gemray_workers.checkpoint.index import StoredTensor, read_index
from gemray_workers.checkpoint.loader import STORED_DTYPES
from gemray_workers.config import EngineConfig
from gemray_workers.errors import CapacityError, CheckpointError
from gemray_workers.messages import MemoryInfo
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import compute_dtype
from gemray_workers.parallel.silent_communicator import SilentCommunicator
from gemray_workers.rank.attention_memory import attention_scratch_bytes
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.card_memory import CardMemory
from gemray_workers.rank.control_group import control_groups, left_of_control_groups

GIB = 1 << 30
PATIENCE_S = 20.0
"""A process that was killed a moment ago (a gang that is rebuilt) still holds its memory for a while."""
_POLL_S = 0.5
_STREAMS = 4
"""Hidden-size rows that live at one time beside an MLP's: residual, normed input, attention's input and output."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of one target rank."""

    weights: int
    """The target's shard."""
    drafter: int
    """Weights of the colocated drafters; 0 of one whose files can't be read from here."""
    kv: int
    """Pages of all groups."""
    work: int
    """Working memory of one step of the most rows."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.drafter + self.kv + self.work

    @classmethod
    def of(cls, blueprint: Blueprint) -> MemoryNeeds:
        """What the first target rank, which has the largest share, will take."""
        config = blueprint.config
        return cls(
            weights=_target_bytes(blueprint),
            drafter=sum(_drafter_bytes(config, path) for path in config.drafter_paths)
            if config.drafter_placement == "colocated"
            else 0,
            kv=blueprint.pools.num_bytes,
            work=_work_bytes(blueprint),
        )


def require_room(
    needs: MemoryNeeds,
    free_bytes: Callable[[], int],
    *,
    place: str,
    ranks_there: int = 1,
    patience_s: float = 0.0,
    states_kv: bool = True,
) -> None:
    """Raise CapacityError, in a sentence with figures and a remedy, unless the ranks' needs fit what is free.

    Args:
        needs: of each rank.
        free_bytes: asked again until the patience runs out.
        place: whose memory it is.
        ranks_there: ranks that will share it.
        patience_s: how long to wait for memory to become free.
        states_kv: whether the size of the pages is a setting; else they are the few of the largest step's requests.
    """
    wanted = ranks_there * needs.total
    until = time.monotonic() + patience_s
    while (free := free_bytes()) < wanted:
        if time.monotonic() + _POLL_S > until:
            each = "" if ranks_there == 1 else f" for {ranks_there} ranks"
            raise CapacityError(
                f"{place} has {gib(free)} of memory free, {gib(wanted)} are wanted{each}: weights "
                f"{gib(needs.weights + needs.drafter)}, KV pages {gib(needs.kv)}, work space {gib(needs.work)} a "
                f"rank; {_remedy(needs, free // ranks_there, states_kv)}"
            )
        time.sleep(_POLL_S)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take: of the card, or of the host or its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(int(psutil.virtual_memory().available), left_of_control_groups())


def total_bytes(device: torch.device) -> int:
    """Bytes of the card, or of the host or the limit of the process's control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    limits = (limit for limit, _ in control_groups())
    return min([int(psutil.virtual_memory().total), *limits])


def memory_info(
    device: torch.device,
    card: CardMemory | None,
    *,
    weights: int,
    drafter: int,
    kv: int,
    graphs: int,
    work: int,
    kv_budget: int,
) -> MemoryInfo:
    """Where a rank's memory is, told by what it knows that it holds and by what is free now."""
    known = weights + drafter + kv + graphs
    if card is None:
        total, free, kept = total_bytes(device), free_bytes(device), 0
        elsewhere = max(0, total - free - known)
    else:
        total, free = card.total, card.free()
        # The driver's part of the graphs is not the allocator's, so the sum may exceed what that holds.
        kept = max(0, card.reserved() - known)
        elsewhere = max(0, total - free - kept - known)
    headroom = total - elsewhere - known - work
    return MemoryInfo(
        total=total,
        weights=weights,
        drafter=drafter,
        kv=kv,
        graphs=graphs,
        work=work,
        elsewhere=elsewhere,
        headroom=max(0, headroom),
        kv_budget=kv_budget,
    )


def _remedy(needs: MemoryNeeds, free: int, states_kv: bool) -> str:
    left = free - needs.total + needs.kv
    if needs.weights + needs.drafter < free and not (left > 0 and states_kv):
        return "lower max_num_seqs, max_step_tokens, prefill_chunk or page_size, or raise tp"
    if left > 0:
        return f"lower kv_memory to {gib(left)} at most"
    return "the model alone does not fit: raise tp, or take a smaller one"


def gib(num_bytes: int) -> str:
    """A size as people read it."""
    return f"{num_bytes / GIB:.2f} GiB"


def _target_bytes(blueprint: Blueprint) -> int:
    """Bytes of the target's shard, from a model on the meta device whose ranks do not communicate."""
    config = blueprint.config
    comm = SilentCommunicator(0, config.tensor_parallel_size)
    model = TargetModel(blueprint.model, comm, dtype=config.torch_dtype, device=torch.device("meta"))
    return sum(copy.destination.nbytes for target in model.weight_targets() for copy in target.copies)


def _drafter_bytes(config: EngineConfig, path: str) -> int:
    """A rank's even share of what is on disk, in the dtype served; small replicated parts are left out."""
    if config.method == "none" or config.random_weights:
        return 0
    try:
        stored = read_index(path).tensors.values()
    except CheckpointError:
        return 0
    total = sum(prod(tensor.shape) * _itemsize_kept(tensor, config.torch_dtype) for tensor in stored)
    return total // config.tensor_parallel_size


def _itemsize_kept(tensor: StoredTensor, dtype: torch.dtype) -> int:
    """Bytes of each number of a drafter in memory: packed codes stay as they are."""
    stored = STORED_DTYPES.get(tensor.dtype, dtype)
    return dtype.itemsize if stored.is_floating_point and stored.itemsize > 1 else stored.itemsize


def _work_bytes(blueprint: Blueprint) -> int:
    config, model, scheduler = blueprint.config, blueprint.model, blueprint.scheduler
    tp = config.tensor_parallel_size
    intermediate_size = max(layer.intermediate_size for layer in model.layers) // tp
    branch = 3 * intermediate_size
    if model.moe is not None:
        # Every expert's output is kept until a row's are added, and the dense MLP's beside them.
        experts = model.moe.top_k * (model.hidden_size + model.moe.intermediate_size // tp)
        branch = max(branch, experts + model.hidden_size)
    width = _STREAMS * model.hidden_size + branch
    choosing = min(scheduler.max_step_tokens, scheduler.max_num_seqs * (1 + scheduler.num_draft_tokens))
    logits = choosing * model.vocab_size // tp * compute_dtype(config.torch_dtype).itemsize
    # Prompts may have a packed weight's numbers written down: gate and up are the most of them.
    unpacked = 0 if model.quantization is None else 2 * intermediate_size * model.hidden_size
    step = (scheduler.max_step_tokens * width + unpacked) * config.torch_dtype.itemsize
    # Layers are done when tokens are chosen; attention's memory stays.
    return attention_scratch_bytes(blueprint) + max(step, logits)
