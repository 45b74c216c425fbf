"""Steps that no graph holds have rows of drafters in every tile of plain products: a start rehearses them all."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton.linear_ahead import AHEAD_ROWS, MOST_AHEAD_ROWS, ROW_TILES, rows_of_tile
from gemray_workers.engine.buckets import decode_buckets
from gemray_workers.rank.eager_shapes import eager_shapes


def tiles(rows: set[int]) -> set[tuple[int, int]]:
    return {rows_of_tile(count) for count in rows if 0 < count <= MOST_AHEAD_ROWS}


@pytest.mark.parametrize("drafts", [(15,), (4,), (1,), (4, 15), (15, 4)])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 32, 100])
def test_rehearsed_rows_have_every_tile(max_num_seqs: int, drafts: tuple[int, ...]) -> None:
    shapes = eager_shapes(
        max_num_seqs=max_num_seqs, num_draft_tokens=drafts, prefill_chunk=512, max_step_tokens=2048,
        max_model_len=4000, tiled_rows=AHEAD_ROWS, drafted_rows=[sum(tile) for tile in ROW_TILES], has_graphs=True,
    )  # fmt: skip
    shapes += decode_buckets(max_num_seqs, drafts)
    for drafter, most in enumerate(drafts):
        own = [shape.by_drafter[drafter] for shape in shapes if len(shape.by_drafter) > drafter]
        assert tiles({shape.num_drafting for shape in own}) >= tiles(set(range(1, max_num_seqs + 1)))
        # Blocks of a sequence have two rows at least.
        assert tiles({shape.num_block_rows for shape in own}) >= tiles(set(range(2, max_num_seqs * (1 + most) + 1)))
