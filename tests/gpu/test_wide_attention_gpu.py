"""Attention of few rows with heads of 512 on a card: against float64, keys from values, and what bits follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference import paged_attention as reference
from gemray_kernels.reference.keys_of_values import KeysOfValues
from support.engine.gpu import needs_gpus
from support.kernels.kernel_parity import AttentionCase, poisoned_memory, relative_error

pytestmark = pytest.mark.gpu

LAYERS = {"31B": (32, 4), "26B-A4B": (16, 2), "12B": (16, 1), "E4B": (8, 2), "E2B": (8, 1)}
LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 4000), (1, 513), (1, 1024), (1, 64)],
    "two rows": [(2, 700), (1, 2049), (2, 2), (2, 130), (1, 40)],
    "four rows": [(4, 700), (3, 2049), (1, 16), (4, 130)],
    "verify": [(5, 700), (5, 2049), (4, 16), (1, 130), (5, 3000), (7, 0)],
    "block": [(16, 700), (9, 2049), (16, 16), (1, 130), (16, 9), (12, 3000)],
    "most rows": [(32, 700), (31, 31), (17, 5000)],
    "many sequences": [(1, 50 + 13 * i) for i in range(100)],
    "eight rows": [(8, 700), (7, 2049), (8, 8), (1, 77)],
}
FEW = ("decode", "two rows", "four rows", "many sequences")
"""Rows of eight heads a KV head, whose keys may be read whole."""
TOLERANCE = 4e-3
"""Weights and results are rounded to bfloat16, one after the other: 2e-3."""
FROM_VALUES = 5e-3
"""Queries times weights are rounded, too."""


def kernel(most_rows: int, layer: str = "31B", keys: KeysOfValues | None = None) -> Callable[..., Tensor]:
    """What is served, where it takes `wide_attention`."""
    from gemray_kernels.triton.early_start import on_hopper
    from gemray_kernels.triton.paged_attention import paged_attention
    from gemray_kernels.triton.wide_attention import is_wide

    needs_gpus(1)
    heads, kv_heads = LAYERS[layer]
    probe = torch.empty(1, heads, 512, dtype=torch.bfloat16, device="cuda")
    if not on_hopper(probe):
        pytest.skip("the device is not of compute capability 9.0")
    pages = torch.empty(1, 16, kv_heads, 512, dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = {"most_rows": most_rows, "keys_of_values": keys}
    assert is_wide(probe, pages, 1, window=None, causal=True, **options)
    return partial(paged_attention, **options)


def most_rows_of(lengths: list[tuple[int, int]]) -> int:
    return max(rows for rows, keys in lengths if keys)


@pytest.mark.parametrize(
    ("layer", "lengths"),
    [
        *((layer, lengths) for layer in ("31B", "26B-A4B", "E4B", "E2B") for lengths in FEW),
        ("12B", "two rows"),
        ("E4B", "verify"),
        ("E4B", "eight rows"),
    ],
)
def test_it_attends_to_what_rows_see(layer: str, lengths: str) -> None:
    """Slots that no row sees, and memory before it is written, hold NaN."""
    of = LENGTHS[lengths]
    case = AttentionCase(of, *LAYERS[layer], 512)
    error = case.error(kernel(most_rows_of(of), layer), torch.bfloat16, "cuda", seed=len(lengths))
    assert error < TOLERANCE, error


@pytest.mark.parametrize(("layer", "lengths"), [*(("31B", lengths) for lengths in LENGTHS), ("12B", "verify")])
def test_values_give_the_keys_of_one_projection(layer: str, lengths: str) -> None:
    """Keys' dims that do not rotate hold NaN: they are not read."""
    of = LENGTHS[lengths]
    case = AttentionCase(of, *LAYERS[layer], 512)
    q_TND, k_pages, v_pages, *tables = case.batch(torch.bfloat16, "cuda", seed=3)
    weight_D = (1 + 0.5 * torch.randn(512, device="cuda")).bfloat16()
    weight_D[100:110] = 0
    stands_D = torch.ones(512, dtype=torch.bool, device="cuda")
    stands_D[:64] = stands_D[256:320] = False
    keys = torch.where(stands_D, v_pages.double() * weight_D.double(), k_pages.double())
    k_pages[..., stands_D] = torch.nan
    attend = kernel(most_rows_of(of), layer, KeysOfValues(weight_D, 64))
    expected = reference.paged_attention(
        q_TND.double(), keys, v_pages.double(), *tables, window=None, causal=True, scale=1.0
    )
    with poisoned_memory():
        found = attend(q_TND, k_pages, v_pages, *tables, window=None, causal=True, scale=1.0)
    error = relative_error(found, expected)
    assert error < FROM_VALUES, error


@pytest.mark.parametrize("rows", [1, 5])
def test_a_sequence_has_the_same_bits_beside_any_others(rows: int) -> None:
    """In a step of the same shape, however long the others are and wherever pages lie; and in every run."""
    attend = kernel(rows, keys=KeysOfValues(torch.ones(512, dtype=torch.bfloat16, device="cuda"), 64))
    ones = [(rows, keys) for keys in (1300, 700, 64, 2500)]
    others = [(rows, keys) for keys in (1300, 5000, 9, 80)]
    found = []
    for lengths, seed in ((ones, 1), (others, 2), (ones, 1)):
        q_TND, k_pages, v_pages, table_SP, *tables = AttentionCase(lengths, 32, 4, 512).batch(
            torch.bfloat16, "cuda", seed=seed
        )
        generator = torch.Generator("cuda").manual_seed(0)
        mine: Any = partial(torch.randn, generator=generator, device="cuda")
        q_TND[:rows] = (mine(rows, 32, 512) * 1.5 / 512**0.5).bfloat16()
        at = torch.arange(1300, device="cuda")
        for pages in (k_pages, v_pages):
            pages[table_SP[0].long()[at // 16], at % 16] = mine(1300, 4, 512).bfloat16()
        found.append(attend(q_TND, k_pages, v_pages, table_SP, *tables, window=None, causal=True, scale=1.0)[:rows])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
