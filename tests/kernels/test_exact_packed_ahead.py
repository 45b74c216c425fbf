"""Exact products whose weights are asked for before rows, and those of prompts: which they are, and as compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.triton import packed_ahead
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.exact_packed import TiledExactProduct
from gemray_kernels.triton.exact_packed_ahead import exact_packed_gated_ahead, exact_packed_summands_ahead
from gemray_kernels.triton.factor_parts import SHORT, with_parts
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_prompts import packed_prompt_linear
from gemray_kernels.triton.packed_tile_choice import PROMPT_TILES
from support.kernels.packed_cases import FORMATS, random_packed
from support.kernels.triton_compile import MAX_SHARED_BYTES, Compiled, compile_launches, launches_of, loop_of

TILE = AheadTile(outputs=64, num_stages=3)
NAMES = ("int4 group 32", "nvfp4", "fp8 channel", "fp8 channel float32")
FEW, AHEAD, PROMPT, NUMBERS = (
    "_exact_packed_kernel",
    "_packed_ahead_kernel",
    "_packed_prompt_kernel",
    "_dequantize_kernel",
)


def exact(name: str, num_out: int, num_in: int, leaves: int) -> TiledWeight:
    weight = random_packed(FORMATS[name], num_out, num_in, device="cpu", leaves=leaves)
    assert weight.tiling is not None
    return with_parts(laid_out(weight, weight.tiling))


def hollow(name: str, num_out: int, num_in: int, leaves: int) -> TiledWeight:
    """A weight of which nothing but its shape is right."""
    small = exact(name, 64, 256 * leaves, leaves)
    units = num_in // small.unit.inputs
    return replace(
        small,
        words_BOC=torch.empty(units, num_out, small.unit.words, dtype=torch.int16),
        scale_BO=torch.empty(units, num_out, dtype=small.scale_BO.dtype),
        factor_O=torch.empty(num_out),
        parts_O=None if small.parts_O is None else torch.empty(num_out, dtype=torch.int32),
        num_in=num_in,
    )


def compiled(call: Callable[[], object]) -> Compiled:
    with mock.patch.object(packed_ahead, "starts_early", return_value=True):
        (kernel,) = compile_launches(call)
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert not kernel.stack_bytes, "registers spill"
    assert not kernel.lost_products
    assert "st.shared" not in loop_of(kernel.ptx), "numbers go through shared memory"
    return kernel


@pytest.mark.parametrize("gate", [Gate.NONE, Gate.GELU])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_asked_for_before_rows_are_waited_for(name: str, gate: Gate) -> None:
    x_TI = torch.empty(3, 1024, dtype=torch.bfloat16)
    if gate is Gate.NONE:
        weight = exact(name, 1024, 1024, 8)
        kernel = compiled(lambda: exact_packed_summands_ahead(x_TI, weight, TILE, out_dtype=torch.float32))
    else:
        weight = exact(name, 1024, 1024, 1)
        kernel = compiled(lambda: exact_packed_gated_ahead(x_TI, weight, TILE, gate))
    before, after = kernel.ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before
    weights = (1 if name.startswith("fp8") else 2) * (1 if gate is Gate.NONE else 2)
    assert [len(re.findall(r"cp\.async\.bulk\.tensor", part)) for part in (before, after)] == [weights, 4 + weights]


@pytest.mark.parametrize(("parts", "products"), [(2, 64), (SHORT, 32 + 16)])
def test_short_parts_take_fewer_instructions(parts: int, products: int) -> None:
    """64 numbers a thread, with 16 scales: a product with the scale and one with the low part for two; or one
    with the scale's low part, and for two scales one with either part."""
    weight = replace(exact("nvfp4", 1024, 1024, 1), parts=parts)
    x_TI = torch.empty(1, 1024, dtype=torch.bfloat16)
    kernel = compiled(lambda: exact_packed_summands_ahead(x_TI, weight, TILE, out_dtype=torch.bfloat16))
    assert len(re.findall(r"fma\.rn\.bf16x2", loop_of(kernel.ptx))) == 32
    assert kernel.products_of_pairs in (products, None)


@pytest.mark.parametrize("name", ["int4 group 32", "nvfp4", "fp8 channel", "fp8 block 128"])
def test_products_of_prompts_keep_numbers_in_registers(name: str) -> None:
    weight = exact(name, 1024, 1024, 1)
    if name == "fp8 block 128":
        weight = with_parts(replace(weight, scale_BO=weight.scale_BO.bfloat16().float()))
    x_TI = torch.empty(512, 1024, dtype=torch.bfloat16)
    kernel = compiled(lambda: packed_prompt_linear(x_TI, weight, PROMPT_TILES[2], out_dtype=torch.bfloat16, exact=True))
    assert "wgmma" in loop_of(kernel.ptx)


@pytest.mark.parametrize(
    ("name", "rows", "aligned", "served"),
    [
        ("int4 group 32", 8, True, [AHEAD, FEW, AHEAD, FEW]),
        ("nvfp4", 8, True, [AHEAD, AHEAD, AHEAD, FEW]),
        ("nvfp4", 9, True, [FEW, FEW, FEW, FEW]),
        ("nvfp4", 8, False, [FEW, FEW, FEW, FEW]),
        ("fp8 channel", 1, True, [AHEAD, FEW, AHEAD, FEW]),
        ("fp8 channel", 65, True, [PROMPT, PROMPT, PROMPT, FEW]),
        ("nvfp4", 65, False, [NUMBERS, NUMBERS, NUMBERS, FEW]),
        ("nvfp4", 256, True, [PROMPT, PROMPT, PROMPT, FEW]),
        ("int4 group 32", 257, True, [NUMBERS, PROMPT, PROMPT, FEW]),
        ("int4 group 32", 641, True, [NUMBERS, NUMBERS, PROMPT, FEW]),
        ("fp8 block 128", 65, True, [NUMBERS, NUMBERS, NUMBERS, FEW]),
    ],
)
def test_which_kernel_serves(name: str, rows: int, aligned: bool, served: list[str]) -> None:
    """Kernels of 31B's o, down, gate and up rows, and of qkv's first eight."""

    def row(width: int) -> Tensor:
        """Rows that the memory accelerator cannot address, if they are not aligned."""
        return torch.empty(rows, width if aligned else width + 1, dtype=torch.bfloat16)[:, :width]

    shapes = ((5376, 8192, 8), (5376, 21504, 8), (43008, 5376, 1), (16384, 5376, 1))
    o, down, gate_up, qkv = (TiledExactProduct(hollow(name, *shape)) for shape in shapes)
    calls: tuple[Callable[[], object], ...] = (
        lambda: o.summands(row(8192)),
        lambda: down.wide_summands(row(21504)),
        lambda: gate_up.gelu(row(5376)),
        lambda: qkv.summands(row(5376)[:8]),
    )
    assert [launches_of(call)[0] for call in calls] == served


@pytest.mark.parametrize(("name", "num_in", "leaves"), [("int8 channel", 88, 1), ("nvfp4", 8 * 176, 8)])
def test_products_of_prompts_have_whole_units(name: str, num_in: int, leaves: int) -> None:
    """A small unit of int8 is less than the kernel's step has room for, and a leaf may end inside a step."""
    product = TiledExactProduct(exact(name, 1024, num_in, leaves))
    x_TI = torch.empty(65, num_in, dtype=torch.bfloat16)
    assert launches_of(lambda: product.summands(x_TI))[0] == NUMBERS


@pytest.mark.parametrize(
    ("name", "num_in", "leaves", "match"),
    [
        ("fp8 block 128", 1024, 1, "0 parts of its factors"),
        ("int4 group 32", 768, 8, "8 leaves of 96 inputs"),
    ],
)
def test_what_the_kernel_is_not_for_is_refused(name: str, num_in: int, leaves: int, match: str) -> None:
    x_TI = torch.empty(1, num_in, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=match):
        exact_packed_summands_ahead(x_TI, exact(name, 1024, num_in, leaves), TILE, out_dtype=torch.float32)


def test_a_gated_product_is_one_leaf() -> None:
    with pytest.raises(ValueError, match="8 leaves"):
        exact_packed_gated_ahead(
            torch.empty(1, 1024, dtype=torch.bfloat16), exact("nvfp4", 1024, 1024, 8), TILE, Gate.GELU
        )
