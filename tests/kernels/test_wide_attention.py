"""Attention of few rows with heads of 512: whose kernel it is, how keys are cut, and what it is compiled to."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.attention_scratch import AttentionShape, scratch_bytes
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.triton import early_start, wide_attention
from gemray_kernels.triton.paged_attention import paged_attention
from gemray_kernels.triton.wide_attention import attend_wide, fewest_chunks, is_wide, shape_of, usual_tiles
from gemray_workers.engine.buckets import decode_buckets
from gemray_workers.rank.eager_shapes import eager_shapes
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches, loop_of

LAYERS = {"31B": (32, 4), "26B-A4B": (16, 2), "31B, rank of four": (8, 1), "E4B": (8, 2)}
PAGES = torch.empty(3, 16, 4, 512, dtype=torch.bfloat16)
ROTATING = KeysOfValues(torch.empty(512, dtype=torch.bfloat16), num_rotating=64)


def launched(
    layer: str = "31B",
    *,
    rows: int = 8,
    num_seqs: int = 9,
    most_rows: int | None = 1,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 512,
    capability: tuple[int, int] = (9, 0),
    scratch: torch.Tensor | None = None,
    keys_of_values: KeysOfValues | None = None,
    **options: Any,
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments and constants of the kernels of one call, by name, on a card of this capability."""
    from triton.runtime.jit import JITFunction

    found = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found[kernel.__name__] = (arguments, constants)

    heads, kv_heads = LAYERS[layer]
    pages = torch.empty(3, 16, kv_heads, head_dim, dtype=dtype)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(early_start, "_capability", return_value=capability),
        mock.patch.object(wide_attention, "on_hopper", return_value=capability == (9, 0)),
    ):
        paged_attention(
            torch.empty(rows, heads, head_dim, dtype=torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype),
            pages,
            pages,
            torch.zeros(num_seqs, 300, dtype=torch.int32),
            torch.zeros(num_seqs + 1, dtype=torch.int32),
            torch.zeros(num_seqs, dtype=torch.int32),
            most_rows=most_rows,
            keys_of_values=keys_of_values,
            scratch=scratch,
            **{"window": None, "causal": True, "scale": 1.0, **options},
        )
    return found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [1, 5, 16, 32])
def test_few_rows_of_wide_heads_take_it(layer: str, rows: int) -> None:
    found = launched(layer, rows=8 * rows, most_rows=rows, keys_of_values=ROTATING)
    assert sorted(found) == ["combine_chunks_kernel", "wide_attend_kernel"]


@pytest.mark.parametrize(
    "options",
    [
        {"most_rows": 33},
        {"most_rows": None},
        {"dtype": torch.float32},
        {"dtype": torch.float8_e4m3fn},
        {"head_dim": 256},
        {"window": 1024},
        {"causal": False},
        {"capability": (10, 0)},
        {"capability": (8, 0)},
        {"rows": 300, "num_seqs": 9},
        {"most_rows": 5, "rows": 40},  # of eight heads, whose keys are read whole
        {"num_seqs": 129},
    ],
    ids=str,
)
def test_what_it_is_not_for_is_attended_as_before(options: dict[str, Any]) -> None:
    assert {"attend_kernel", "combine_kernel"} <= launched(**options).keys()


def test_pages_that_the_accelerator_cannot_address_do_not_fit() -> None:
    q_TND = torch.empty(1, 32, 512, dtype=torch.bfloat16)
    options: dict[str, Any] = {"window": None, "causal": True, "most_rows": 1, "keys_of_values": ROTATING}
    with mock.patch.object(wide_attention, "on_hopper", return_value=True):
        assert is_wide(q_TND, PAGES, 1, **options)
        assert not is_wide(q_TND, PAGES[:, :8], 1, **options)
        assert not is_wide(q_TND, PAGES.new_empty(3, 32, 4, 512), 1, **options)
        assert not is_wide(q_TND[:, :12], PAGES, 1, **options)  # three heads a KV head


def test_values_stand_for_keys_where_they_are_one_projection() -> None:
    """All but the first 64 dims of each half; a layer whose keys rotate in more of them is read whole."""
    of_shape = {
        name: launched(keys_of_values=keys)["wide_attend_kernel"]
        for name, keys in (("none", None), ("some", ROTATING), ("all", KeysOfValues(ROTATING.weight_D, 256)))
    }
    assert {name: constants["SHAPE"].key_blocks for name, (_, constants) in of_shape.items()} == {
        "none": 8,
        "some": 2,
        "all": 8,
    }
    assert of_shape["some"][0][3] is ROTATING.weight_D


@pytest.mark.parametrize(
    ("num_seqs", "most_rows", "kv_heads", "chunks"),
    [
        (2, 1, 4, 32),
        (9, 1, 4, 4),
        (9, 5, 4, 4),
        (9, 16, 4, 2),
        (5, 1, 4, 8),
        (2, 1, 2, 32),
        (9, 1, 2, 8),
        (128, 1, 4, 1),
    ],
)
def test_chunks_make_an_item_for_each_multiprocessor(num_seqs: int, most_rows: int, kv_heads: int, chunks: int) -> None:
    """The null slot has none. One long sequence among short ones is cut into more, the fewer the larger results are."""
    shape = shape_of(8 * kv_heads, kv_heads, most_rows, most_chunks=32, values=True, early=True)
    assert fewest_chunks(num_seqs, most_rows, shape) == chunks
    assert usual_tiles(shape) == (16 if most_rows <= 4 else 32)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_call_lies_in_the_memory_of_a_rank(layer: str) -> None:
    heads, kv_heads = LAYERS[layer]
    scratch = torch.empty(scratch_bytes(AttentionShape(heads, kv_heads, 512, None, 4800), 160, 9, 2), dtype=torch.uint8)
    for rows, most_rows in ((160, 32), (8, 1), (1, 1)):
        found = launched(layer, rows=rows, most_rows=most_rows, scratch=scratch, keys_of_values=ROTATING)
        arguments, _ = found["combine_chunks_kernel"]
        for partial in arguments[1:3]:
            assert scratch.data_ptr() <= partial.data_ptr()
            assert partial.data_ptr() + partial.nbytes <= scratch.data_ptr() + scratch.nbytes


@pytest.mark.parametrize("has_graphs", [True, False])
def test_steps_compile_nothing_while_requests_run(has_graphs: bool) -> None:
    drafts = (4,)
    shapes = eager_shapes(
        max_num_seqs=100, num_draft_tokens=drafts, prefill_chunk=512, max_step_tokens=640, max_model_len=4000,
        tiled_rows=(), drafted_rows=(), has_graphs=has_graphs,
    )  # fmt: skip
    if has_graphs:
        shapes += decode_buckets(100, drafts)

    def programs(rows: int, num_seqs: int, most_rows: int) -> set[tuple[Any, ...]]:
        found = launched(rows=rows, num_seqs=num_seqs, most_rows=most_rows, keys_of_values=ROTATING)
        return {(name, *sorted(constants.items())) for name, (_, constants) in found.items() if "w" in name}

    at_start: set[tuple[Any, ...]] = set()
    for shape in shapes:
        if shape.most_rows <= 32:
            at_start |= programs(shape.num_rows, shape.num_sequences + 1, shape.most_rows)
    for num_seqs in (1, 2, 7, 63, 64, 100):
        for most_rows in (1, 2, 3, 4, 5, 7, 16, 32):
            rows = min(num_seqs * most_rows, 640)
            later = programs(rows, num_seqs + 1, most_rows) - at_start
            assert not later, (num_seqs, most_rows, later)


@pytest.mark.parametrize(("most_rows", "has_values"), [(1, True), (5, True), (1, False), (4, False)])
def test_products_read_what_was_fetched_where_it_lies(most_rows: int, has_values: bool) -> None:
    """Both products of a tile are under way at a time, from shared memory; what goes through it besides is weights."""
    q_TND = torch.empty(8 * most_rows, 32, 512, dtype=torch.bfloat16)
    table_SP, start_Z, kv_len_S = (torch.zeros(shape, dtype=torch.int32) for shape in ((8, 300), (9,), (8,)))
    keys = ROTATING if has_values else None
    attend, _ = compile_launches(
        lambda: attend_wide(
            q_TND,
            PAGES,
            PAGES,
            table_SP,
            start_Z,
            kv_len_S,
            torch.empty_like(q_TND),
            scale=1.0,
            most_rows=most_rows,
            keys_of_values=keys,
        )
    )
    groups = 2 if most_rows == 5 else 1
    pairs = min(32, 8 * most_rows)
    assert attend.shared_bytes <= MAX_SHARED_BYTES
    assert not attend.lost_products
    loop = loop_of(attend.ptx)
    products = re.findall(r"wgmma.mma_async\S*\.m64n(\d+)k16", loop)
    assert products == [str(pairs)] * (512 // 16 + 512 // 64 * 64 // 16)
    assert re.findall(r"wgmma.wait_group\S* (\d+);", loop) == ["0", "0"]
    assert attend.product_waits in (2 * groups, None)
    assert "ld.local" not in loop, "registers spill"
    fetches = re.findall(r"cp.async.bulk.tensor.3d", attend.ptx)
    assert len(fetches) == 4 * (8 + (2 if has_values else 8))


def test_items_cover_all_keys_and_their_chunks_combine() -> None:
    assert interpreted("wide_attention").splitlines() == ["8 cases"]
