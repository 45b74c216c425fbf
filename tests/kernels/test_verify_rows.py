"""Fast tiles of 65 to 256 rows where there is no GPU: which serve, that others are refused, and compiled for Hopper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import early_start, linear_choice, verify_rows
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.rows_pieces import MOST_WIDTH
from gemray_kernels.triton.verify_rows import VerifyRowsTile, verify_rows_gated, verify_rows_linear
from gemray_kernels.triton.verify_rows_tiles import gated_verify_tile, verify_tile_of_summands, whole_verify_tile
from support.kernels.triton_compile import MAX_SHARED_BYTES, Compiled, compile_launches

FEW_SPILLS = 96
"""Bytes of a thread that some assemblers spill where sums are stored, beside the loop."""
TILES = (
    VerifyRowsTile(1, 128),
    VerifyRowsTile(1, 160),
    VerifyRowsTile(2, 80),
    VerifyRowsTile(2, 80, splits=3),
    VerifyRowsTile(2, 160, splits=3),
    VerifyRowsTile(2, 256),
    VerifyRowsTile(3, 160),
)
SHAPES = [(43008, 5376), (21504, 5376), (5376, 8192), (5376, 16384), (5376, 4096), (5376, 21504), (5376, 10752)]
"""Outputs and inputs of 31B's and of a rank's of two."""


@pytest.mark.parametrize("choose", [gated_verify_tile, whole_verify_tile, verify_tile_of_summands])
def test_chosen_tiles_hold_all_rows(choose: Callable[[int, int, int], VerifyRowsTile | None]) -> None:
    chosen = {(rows, shape): choose(rows, *shape) for rows in range(65, MOST_WIDTH + 1) for shape in SHAPES}
    widths = {tile.width: rows for (rows, _), tile in chosen.items() if tile is not None}
    assert widths, "none serves"
    assert all(tile.width >= rows for (rows, _), tile in chosen.items() if tile is not None)
    assert all(tile.splits == 1 or choose is verify_tile_of_summands for tile in chosen.values() if tile is not None)


@pytest.mark.parametrize(("capability", "served"), [((8, 0), 0), ((9, 0), 3), ((10, 0), 0)])
def test_only_hopper_has_them(capability: tuple[int, int], served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later cards lack these instructions, and others have them not yet: the library's product serves."""
    calls: list[tuple[int, ...]] = []

    def noted(x: Tensor, weight: Tensor, tile: VerifyRowsTile, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        calls.append((tile.groups, tile.splits))
        return x, weight

    monkeypatch.setattr(early_start, "_capability", lambda _: capability)
    monkeypatch.setattr(linear_choice, "verify_rows_linear", noted)
    monkeypatch.setattr(linear_choice, "verify_rows_gated", noted)
    monkeypatch.setattr(linear_choice, "gelu_tanh_and_mul", lambda x: x)
    with FakeTensorMode():
        for rows, num_out, num_in, product in (
            (75, 5376, 8192, linear_choice.summands),
            (150, 5376, 4096, linear_choice.linear),
            (80, 43008, 5376, linear_choice.gelu_linear),
            (100, 5376, 8192, linear_choice.summands),
            (300, 5376, 8192, linear_choice.summands),
        ):
            product(*(torch.empty(n, num_in, dtype=torch.bfloat16, device="cuda") for n in (rows, num_out)))
    assert calls == [(2, 3), (1, 1), (2, 1)][:served]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ((0, 64, 1), "groups 0: 1 to 3 are allowed"),
        ((2, 136, 1), "width 136: 16 to 256, one or two powers of two from 16 on, are allowed"),
        ((2, 64, 0), "splits 0: 1 or more are allowed"),
    ],
)
def test_other_tiles_are_refused(fields: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        VerifyRowsTile(*fields)


@pytest.mark.parametrize(
    ("rows", "num_out", "dtype"),
    [(81, 1024, torch.bfloat16), (0, 1024, torch.bfloat16), (80, 1000, torch.bfloat16), (80, 1024, torch.float32)],
)
def test_other_tensors_are_refused(rows: int, num_out: int, dtype: torch.dtype) -> None:
    x, weight = torch.empty(rows, 512, dtype=dtype), torch.empty(num_out, 512, dtype=dtype)
    with pytest.raises(ValueError, match="1 to 80 rows of bfloat16 at multiples of 16 bytes and a contiguous weight"):
        verify_rows_linear(x, weight, VerifyRowsTile(1, 80), out_dtype=torch.bfloat16)


def test_gated_products_are_not_cut() -> None:
    x, weight = torch.empty(80, 512, dtype=torch.bfloat16), torch.empty(1024, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="one part is allowed"):
        verify_rows_gated(x, weight, VerifyRowsTile(1, 80, splits=2), Gate.GELU)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_compile_for_hopper(tile: VerifyRowsTile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_rows, "starts_early", lambda _: True)
    x, weight = (torch.empty(n, 2048, dtype=torch.bfloat16) for n in (tile.width, 4096))
    dtype = torch.bfloat16 if tile.splits == 1 else torch.float32
    kernels = compile_launches(lambda: verify_rows_linear(x, weight, tile, out_dtype=dtype))
    if tile.splits == 1:
        kernels += compile_launches(lambda: verify_rows_gated(x, weight, tile, Gate.GELU))
    for kernel in kernels:
        check(kernel, tile)


def check(kernel: Compiled, tile: VerifyRowsTile) -> None:
    """Whether everything fits, products run beside each other, and nothing is fetched before rows may be read."""
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert (kernel.stack_bytes or 0) <= FEW_SPILLS, "sums spill"
    assert not kernel.lost_products
    # One wait in the loop and one behind it; the assembler adds one behind each product that it cannot let run on.
    assert (kernel.product_waits or 0) <= 2 * tile.groups
    first_fetch, wait = kernel.ptx.index("cp.async.bulk.tensor"), kernel.ptx.index("griddepcontrol.wait")
    assert wait < first_fetch
    assert "wgmma.mma_async" in kernel.ptx
