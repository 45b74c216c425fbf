"""Which cycles a rank captures as graphs, by what its gang is to serve."""

from __future__ import annotations

from gemray_workers.engine.buckets import Key, buckets
from gemray_workers.engine.prompt_room import PromptRoom, worthwhile_rows
from gemray_workers.model.target import first_narrowed
from gemray_workers.rank.blueprint import Blueprint


def graph_buckets(blueprint: Blueprint) -> list[Key]:
    """The buckets of a gang and the features of each, largest first; the same on every rank."""
    config, drafter, scheduler = blueprint.config, blueprint.drafter, blueprint.scheduler
    narrowed = first_narrowed(blueprint.model, drafter.traits.captured_layers)
    return buckets(
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=[member.num_draft_tokens for member in drafter.members],
        prompts=PromptRoom.of(
            chunk=scheduler.prefill_chunk,
            step_rows=scheduler.max_step_tokens,
            worthwhile=worthwhile_rows(blueprint.model, narrowed, config.tensor_parallel_size),
        ),
    )
