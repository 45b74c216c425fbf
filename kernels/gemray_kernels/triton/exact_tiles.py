"""Tiles of exact products. They may follow rows and ranks: no tile changes a sum (`triton.exact_linear` says why).

The rules follow a sweep over the weights of 31B, 26B-A4B and E4B on an H200 (2026-11-29, torch 2.11, triton 3.6), and
one over their layers (`benchmarks/results/2026-11-30-h200-tiles`).
"""

from __future__ import annotations

import torch

from gemray_kernels.numerics import NUM_SHARDS
from gemray_kernels.triton.exact_gemm import GemmTile
from gemray_kernels.triton.exact_linear import ExactTile
from gemray_kernels.triton.exact_pipeline import PipelineTile
from gemray_kernels.triton.linear_tiles import GATE_SPLITS, GATE_TILES, MULTIPROCESSORS

FEW_ROWS = 64
"""Up to so many rows a product is bound by its weight's bytes."""
SHORT_LEAF = 264
"""Inputs of leaves that a long pipeline of small tiles reads fastest."""
SMALL_TILES = 48
"""Tiles of 64 outputs of weights that are multiplied sooner, above 32 rows, by tiles of 32."""


def streaming_tile(num_rows: int, num_out: int, num_in: int, leaves: int, dtype: torch.dtype) -> ExactTile:
    """Choose a tile for few rows, and how many leaves a program adds up, where its reader adds up the rest.

    Args:
        num_rows: at most 64.
        num_out: outputs.
        num_in: inputs.
        leaves: into which they are cut.
        dtype: of rows and weight.
    """
    together = streaming_leaves(num_rows, num_out, leaves)
    if dtype != torch.bfloat16:
        return ExactTile(16, 64, 32, num_warps=4, num_stages=2, leaves=together)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    tiles = -(-num_out // 64)
    if rows == 64 and leaves == 1 and 2 * MULTIPROCESSORS < tiles <= 4 * MULTIPROCESSORS:
        return ExactTile(rows, 128, 64, num_warps=4, num_stages=4)
    if rows == 64 and leaves == 1 and tiles <= SMALL_TILES:
        return ExactTile(rows, 32, 128, num_warps=4, num_stages=6, weight_first=False)
    if together == 2 and num_in // leaves <= SHORT_LEAF:
        return ExactTile(rows, 128, 64, num_warps=4, num_stages=5, leaves=together)
    programs = tiles * leaves // together
    is_deep = programs <= MULTIPROCESSORS or (rows == 16 and programs <= 2 * MULTIPROCESSORS)
    return ExactTile(rows, 64, 128, num_warps=4, num_stages=5 if together == 1 and is_deep else 3, leaves=together)


def streaming_leaves(num_rows: int, num_out: int, leaves: int) -> int:
    """Choose how many leaves, 1, 2 or 4, a program of few rows adds up, where its reader adds up the rest."""
    tiles = -(-num_out // 64)
    if tiles == GATE_TILES and num_rows > 16:
        return max(1, leaves // GATE_SPLITS)
    if num_rows > 32 and tiles > MULTIPROCESSORS // 2 and leaves >= 4 and tiles * leaves >= 4 * 128:
        return 4
    # Up to 32 rows the summands of a leaf each are read as fast as a program's second leaf.
    enough = 4 * MULTIPROCESSORS if leaves == NUM_SHARDS and num_rows <= 32 else 2 * 128
    return 2 if leaves > 1 and tiles * leaves >= enough else 1


def gemm_tile(num_rows: int) -> GemmTile:
    """Choose a tile of one leaf for many rows."""
    if num_rows >= 1024:
        return GemmTile(256, 128, 64, num_warps=8, num_stages=3)
    return GemmTile(128, 128, 64, num_warps=4, num_stages=4)


def pipeline_beats_gemm(num_rows: int, num_out: int) -> bool:
    """Whether tiles of 256 outputs, one a multiprocessor, are done sooner than those of 128, which take 1.1 times as
    long for as many sums."""
    return 2 * _rounds(num_rows, num_out, 256) <= 1.1 * _rounds(num_rows, num_out, 128)


def pipeline_tile(num_rows: int, num_out: int, leaves: int) -> PipelineTile:
    """Choose a tile for many rows, and how many leaves a program adds up, where its reader adds up the rest."""
    if leaves == 1:
        return PipelineTile(256, num_stages=4, leaves=1)
    together = [n for n in (8, 4, 2, 1) if n <= leaves]
    # A reader that adds up twice as many parts costs a twentieth of the product.
    times = [n * (1 + 0.05 * i) * _rounds(num_rows, num_out, 128, leaves // n) for i, n in enumerate(together)]
    best = together[times.index(min(times))]
    return PipelineTile(128, num_stages=5 if best == NUM_SHARDS else 6, leaves=best)


def _rounds(num_rows: int, num_out: int, outputs: int, splits: int = 1) -> int:
    """How often all multiprocessors compute a tile of 128 rows."""
    tiles = -(-num_rows // 128) * -(-num_out // outputs) * splits
    return -(-tiles // MULTIPROCESSORS)


def pointer_tile(leaves: int, dtype: torch.dtype) -> ExactTile:
    """Choose a tile for many rows of what the memory accelerator cannot address; it adds up 1 or 2 leaves."""
    if dtype != torch.bfloat16:
        return ExactTile(16, 64, 32, num_warps=4, num_stages=2, leaves=leaves)
    return ExactTile(128, 128, 64, num_warps=8, num_stages=3, leaves=leaves, weight_first=False)
