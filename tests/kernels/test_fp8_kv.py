"""Keys and values as 8-bit floats: what is kept of a number, and attention over what was kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_kernels.fp8_kv import FP8, to_fp8
from gemray_kernels.reference.kv_write import write_kv
from gemray_kernels.reference.paged_attention import paged_attention
from support.kernels.kernel_parity import AttentionCase

DECODE = AttentionCase([(1, 1), (5, 5), (1, 19), (7, 13), (3, 8), (2, 0)], 4, 2, 8, page_size=4)


def numbers_of_the_format() -> Tensor:
    """Every number that e4m3 has, in order."""
    bits = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    return bits.view(FP8).double().unique()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_nearest_number_is_kept(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.cat([torch.randn(400, generator=generator) * spread for spread in (1e-3, 0.1, 20, 300)]).to(dtype)
    kept = to_fp8(x, 0.5).double()
    table = numbers_of_the_format()
    table = table[table.isfinite()]
    wanted = (x.double() / 0.5).clamp(-448, 448)
    distance = (kept - wanted).abs()
    nearest = (table.unsqueeze(0) - wanted.unsqueeze(1)).abs().amin(1)
    torch.testing.assert_close(distance, nearest, rtol=0, atol=0)


def test_ties_go_to_even_and_ends_saturate() -> None:
    x = torch.tensor([17.0, 19.0, 448.0, 465.0, 1e9, -1e9, torch.inf, -torch.inf, 2.0**-10, 3 * 2.0**-10])
    expected = [16.0, 20.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 0.0, 2.0**-8]
    assert to_fp8(x, 1.0).float().tolist() == expected
    assert to_fp8(torch.tensor([torch.nan]), 1.0).float().isnan().all(), "a fault must stay visible"


def test_every_number_of_the_format_comes_back() -> None:
    table = numbers_of_the_format()
    table = table[table.isfinite()]
    scale = 0.0625
    assert torch.equal(to_fp8(table * scale, scale).double(), table)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (4, False)])
def test_attention_reads_what_was_kept(window: int | None, causal: bool) -> None:
    case = AttentionCase(DECODE.lengths, 4, 2, 8, page_size=4, window=window, causal=causal, scale=0.7)
    assert case.fp8_error(paged_attention, torch.float64, "cpu", seed=1) < 1e-14
    assert case.fp8_error(paged_attention, torch.float32, "cpu", seed=1) < 1e-6


def test_rows_are_written_rounded() -> None:
    """Into pages of shuffled order, and nowhere else."""
    k_TND, v_TND = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    k_pages, v_pages = (torch.zeros(4, 4, 2, 8).to(FP8) for _ in range(2))
    places = torch.tensor([9, 4, 14])
    write_kv(k_TND, v_TND, k_pages, v_pages, places, k_scale=0.25, v_scale=3.0)
    for pages, rows, scale in ((k_pages, k_TND, 0.25), (v_pages, v_TND, 3.0)):
        found = pages.view(-1, 2, 8).double() * scale
        assert ((found[places] - rows).abs() <= rows.abs() * 2**-4 + 1e-9).all()
        assert not torch.equal(found[places], rows)
        assert found.count_nonzero() == found[places].count_nonzero()


def test_scales_of_other_pages_are_refused() -> None:
    pages, rows = torch.zeros(2, 4, 1, 8), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=r"scales 0\.5 and 1\.0 are of torch\.float8_e4m3fn pages"):
        write_kv(rows, rows, pages, pages, torch.tensor([0]), k_scale=0.5)
