"""KV memory of a setup: what its largest batch and its longest prompt take, and whether a given size holds them."""

from __future__ import annotations

from dataclasses import replace

from gemray_cluster.bench.settings import Setup
from gemray_workers.errors import InvalidField
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.kv_demand import holds, kv_memory_for
from gemray_workers.rank.memory import gib

MOST_FOR_LOAD = 12 << 30
"""With requests that arrive by themselves pools take up to so much, as far as those can fill it; others wait."""


def with_kv_memory(setup: Setup) -> Setup:
    """The setup with a size of its KV memory, which holds every row.

    Raises:
        InvalidField: the size that it states holds fewer sequences than the largest batch, or not its longest request;
            or other settings do not fit the model.
        GemrayError: the model's or the drafter's directory cannot be used.
    """
    blueprint = Blueprint.of(replace(setup.engine_config(), kv_memory_bytes=None))
    num_seqs, length = max(setup.batch, default=0), setup.batch_len
    if setup.kv_memory is not None and holds(blueprint, setup.kv_memory, num_seqs=num_seqs, length=length):
        return setup
    enough = kv_memory_for(blueprint, num_seqs=num_seqs, length=length)
    if setup.kv_memory is None:
        return replace(setup, kv_memory=enough if setup.load is None else max(enough, MOST_FOR_LOAD))
    batch = f"batch {num_seqs}, of up to {length} tokens a sequence, and " if num_seqs else ""
    raise InvalidField(
        "kv_memory",
        gib(setup.kv_memory),
        f"unset, or {gib(enough)}: setup {setup.name} has {batch}requests of up to {blueprint.requested_len} tokens",
    )
