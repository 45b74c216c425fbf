"""Room for prompt rows in the cycles that are captured as graphs.

A prompt's pass is captured where launching its kernels one by one would take longer than they do. Chunks that are
longer run kernel by kernel, over exactly their own rows. In between, a chunk runs in the next roomier graph, and what
it leaves empty is computed for nothing; so there is one graph for every quarter of a power of two where a prompt runs
alone, which leaves a fifth of the rows empty at worst and a tenth on average. Beside others' decoding, whose graphs
keep logits of their own, there are two for each power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemray_workers.config import LEAST_USUAL_CHUNK
from gemray_workers.model.config import LayerConfig, ModelConfig

SHORT = 256
"""Prompt rows up to which there is a graph for every size of batch."""
LEAST_STEP = 128
"""Rows that a graph has more than the one before it: products compute whole tiles of as many."""
MOST_USUAL_CHUNK = 1024
"""Prompt rows of a step beyond which a prompt gains little: weights are then read for many rows."""
AWAITED_OPERATIONS = 2e13
"""What such a card computes in 25 ms, by which a prompt's chunk may hold up others' decoding where nothing is asked."""
LAUNCHED_OPERATIONS = 4e13
"""What an H100 or H200 computes (at 800 TFLOP/s) in the 50 ms that a host may take to launch a cycle's kernels:
`benchmarks/results/2026-11-29-h200`, *eager*."""


@dataclass(frozen=True)
class PromptRoom:
    """What room there is."""

    beside_any: int
    """Rows of prompt chunks beside every size of batch."""
    alone: tuple[int, ...]
    """More rows, of one prompt by itself."""
    beside_all: tuple[int, ...]
    """More rows, beside a batch of any size in room for the largest."""
    step_rows: int
    """Most rows of a step, those of decoding included."""

    @classmethod
    def of(cls, *, chunk: int, step_rows: int, worthwhile: int) -> PromptRoom:
        """Room for every step that is worth a graph.

        Args:
            chunk: most prompt rows of one sequence in a step.
            step_rows: most rows of a step.
            worthwhile: prompt rows up to which a graph is.
        """
        short = min(chunk, SHORT, step_rows)
        most = max(short, min(step_rows, worthwhile))
        return cls(
            beside_any=short,
            alone=tuple(_rungs(short, min(chunk, most), parts=4)),
            beside_all=tuple(_rungs(short, most, parts=2)),
            step_rows=step_rows,
        )


def _rungs(start: int, most: int, *, parts: int) -> Iterator[int]:
    """Numbers of rows above `start`, so many for each power of two, and `most`."""
    rows = start
    while rows < most:
        power = 1 << (rows.bit_length() - 1)
        step = max(LEAST_STEP, power // parts)
        rows = (rows // step + 1) * step
        if most - rows < LEAST_STEP:
            rows = most
        yield rows


def usual_chunk(model: ModelConfig, first_narrowed: int, tensor_parallel_size: int) -> int:
    """Most prompt rows of one sequence in a step on cards, where nothing is asked for; arguments as below.

    Experts and small models take more: a chunk of a few hundred rows reads nearly all experts, and spends most of its
    time between kernels.
    """
    rows = _rows_of(AWAITED_OPERATIONS, model, first_narrowed, tensor_parallel_size)
    return min(MOST_USUAL_CHUNK, max(LEAST_USUAL_CHUNK, rows))


def worthwhile_rows(model: ModelConfig, first_narrowed: int, tensor_parallel_size: int) -> int:
    """Prompt rows up to which a pass takes a card no longer than its launches take the host.

    Args:
        model: the target.
        first_narrowed: the layer from which on only rows with outputs are computed.
        tensor_parallel_size: ranks that share the products.
    """
    return _rows_of(LAUNCHED_OPERATIONS, model, first_narrowed, tensor_parallel_size)


def _rows_of(operations: float, model: ModelConfig, first_narrowed: int, tensor_parallel_size: int) -> int:
    """Rows whose products take so many operations of each rank, in steps of `LEAST_STEP`."""
    weights = sum(_weights_met(model, layer) for layer in model.layers[: first_narrowed + 1])
    return int(operations * tensor_parallel_size / (2 * weights)) // LEAST_STEP * LEAST_STEP


def _weights_met(model: ModelConfig, layer: LayerConfig) -> int:
    """Weights that a row is multiplied with in a layer."""
    num_kv = 0 if layer.kv_donor is not None else (1 if layer.k_eq_v else 2) * layer.num_kv_heads
    attention = (2 * model.num_attention_heads + num_kv) * layer.head_dim
    width = layer.intermediate_size
    if model.moe is not None:
        width += model.moe.top_k * model.moe.intermediate_size
    return model.hidden_size * (attention + 3 * width)
