"""Run by `test_triton_exact_packed` in a process of its own: prints what differs from the reference, a line each.

As in `interpret_exact_products` sums within a leaf are exact in any order, and leaves have magnitudes of their own, so
that the order of leaves shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.packed_weight import PackedWeight
from gemray_kernels.reference import exact_linear
from gemray_kernels.reference.packed_linear import dequantized
from gemray_kernels.triton import packed_dequantize
from gemray_kernels.triton.activation import gelu_tanh_and_mul
from gemray_kernels.triton.exact_packed_experts import TiledExactExperts, exact_expert_linear
from gemray_kernels.triton.exact_packed_linear import ExactPackedTile, exact_packed_gated, exact_packed_summands
from gemray_kernels.triton.experts import pairs_of_experts
from gemray_kernels.triton.factor_parts import SHORT, with_parts
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_experts import PackedExpertTile
from support.kernels.kernel_parity import poisoned_memory, relative_error
from support.kernels.packed_cases import EXPERTS, FORMATS, copied, random_packed, with_even_numbers
from support.kernels.quick_interpreter import patch_language_once

LEAF = {"int4 group 32": 96, "int4 group 128": 160, "fp8 block 128": 128, "nvfp4": 48, "nvfp4 modelopt": 48}
"""Inputs of a leaf; units of 128 (NVFP4: 64) do not divide them where scales let them be cut anywhere."""
ANY_LEAF = 40
LARGE_UNITS = {"nvfp4": 128}
"""Inputs of leaves of NVFP4 that are cut into larger units, of two runs of words."""
CUT = {"int4 group 32": 40, "fp8 block 128": 40, "nvfp4": 24}
"""Inputs of leaves that begin and end inside groups."""
LAYERS = ("int4 group 32", "int4 group 128", "int8 channel", "fp8 channel", "fp8 block 128", "nvfp4")
MAGNITUDES = (22, 0, 9, 27, 3, 24, 11, 30)
NUM_OUT = 24


def main() -> None:
    """Float32 rows: interpreted bfloat16 is truncated, and these numbers have no digits to lose."""
    for name in LAYERS:
        for leaves in (1, 8):
            for line in of_layer(name, leaves, LEAF.get(name, ANY_LEAF)):
                print(name, leaves, line, sep="\t")
    for name, leaf in LARGE_UNITS.items():
        for line in (*of_layer(name, 1, leaf), *of_layer(name, 8, leaf), *of_second_layer(name, leaf)):
            print(name, "large units", line, sep="\t")
    for name, leaf in CUT.items():
        for line in (*of_layer(name, 8, leaf), *of_second_layer(name, leaf)):
            print(name, "leaves that cut groups", line, sep="\t")
    for name in EXPERTS:
        for line in of_second_layer(name, LEAF.get(name, ANY_LEAF)):
            print(name, line, sep="\t")
    for name in ("fp8 channel", "nvfp4"):
        for line in of_two_parts(name):
            print(name, line, sep="\t")
    for line in of_both_layers("int8 channel"):
        print(line)


def weight_of(name: str, leaves: int, leaf: int, *, first: int = 0, num_experts: int | None = None) -> PackedWeight:
    num_in = leaf * leaves
    weight = random_packed(
        FORMATS[name], NUM_OUT, num_in, device="cpu", first=first * num_in, num_experts=num_experts, leaves=leaves
    )
    assert weight.tiling is not None
    assert weight.tiling.leaves == leaves
    return with_even_numbers(weight)


def tiles_of(weight: PackedWeight) -> TiledWeight:
    assert weight.tiling is not None
    return with_parts(laid_out(weight, weight.tiling))


def rows_of(count: int, num_in: int, leaves: int) -> Tensor:
    """Integers, by a power of two of the leaf's."""
    generator = torch.Generator().manual_seed(num_in)
    scale = torch.tensor([2.0**power for power in MAGNITUDES[:leaves]]).view(1, -1, 1)
    return (torch.randint(-8, 9, (count, leaves, num_in // leaves), generator=generator) * scale).flatten(1)


def of_layer(name: str, leaves: int, leaf: int) -> Iterator[str]:
    """Tiles of either kind, and programs that add up all leaves or some; eight leaves begin at a later place."""
    weight = weight_of(name, leaves, leaf, first=int(leaves > 1))
    x_TI = rows_of(20, weight.num_in, leaves)
    numbers_OI = dequantized(copied(weight), torch.float32)
    parts = exact_linear.wide_summands(x_TI, numbers_OI, leaves)
    expected, in_order = tree_sum(parts), parts.cumsum(0)[-1]
    tiled = tiles_of(weight)
    if not torch.equal(packed_dequantize.dequantized(tiled).float(), numbers_OI):
        yield "numbers that are written down"
    tiles = [ExactPackedTile(32, 4, 2, leaves, weight_first=leaves == 1)]
    if leaves > 1:
        tiles.append(ExactPackedTile(32, 4, 2, 2, weight_first=True))
    for tile in tiles:
        with poisoned_memory():
            found = exact_packed_summands(x_TI, tiled, tile, out_dtype=torch.float32)
        if len(found) != leaves // tile.leaves or not torch.equal(tree_sum(found), expected):
            yield str(tile)
    with poisoned_memory():
        found = exact_packed_summands(x_TI[:3], tiled, ExactPackedTile(32, 4, 2), out_dtype=torch.float32, first=16)
    if not torch.equal(tree_sum(found), expected[:3, 16:]):
        yield "outputs from 16 on"
    if leaves > 1 and torch.equal(found.cumsum(0)[-1], expected[:3, 16:]):
        yield "a sum of leaves in their order does not show"
    if leaves == 1:
        gated = exact_packed_gated(x_TI, tiled, ExactPackedTile(32, 4, 2), Gate.GELU)
        if not torch.equal(gated, gelu_tanh_and_mul(expected)):
            yield "gated"
    if leaves > 1 and torch.equal(in_order, expected):
        yield "the order of leaves does not show"


def of_two_parts(name: str) -> Iterator[str]:
    """A factor of 3, as the sum of 2 and 1, is that of a weight of one part thrice."""
    weight = weight_of(name, 1, LEAF.get(name, ANY_LEAF))
    x_TI = rows_of(5, weight.num_in, 1)
    one = tiles_of(weight)
    assert one.parts == 1
    assert one.parts_O is not None
    # A binade above the part itself, and the part.
    two = replace(one, parts=2, parts_O=one.parts_O + (1 << 7) | one.parts_O << 16)
    short = [replace(two, parts=SHORT)] if name == "nvfp4" else []
    tile = ExactPackedTile(32, 4, 2)
    with poisoned_memory():
        expected, *found = (exact_packed_summands(x_TI, w, tile, out_dtype=torch.float32) for w in (one, two, *short))
    for parts in found:
        if not torch.equal(parts, 3 * expected):
            yield "two parts"


def of_second_layer(name: str, leaf: int) -> Iterator[str]:
    """Pairs that programs find and pairs that are listed, in small tiles and in larger ones."""
    down = weight_of(name, 8, leaf, num_experts=4)
    wide = dequantized(copied(down), torch.float32)
    tiled = tiles_of(down)
    generator = torch.Generator().manual_seed(1)
    chosen_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(20)])
    x_RI = rows_of(40, down.num_in, 8)
    expected = torch.cat(
        [
            tree_sum(exact_linear.wide_summands(x_RI[pair : pair + 1], wide[expert], 8))
            for pair, expert in enumerate(chosen_TK.flatten().tolist())
        ]
    )
    for rows in (3, 17):
        chosen = chosen_TK[:rows].contiguous()
        pairs = None if rows <= 16 else pairs_of_experts(chosen, 4)
        for tile in (None, PackedExpertTile(64, 32, 4, 2)) if pairs else (None,):
            with poisoned_memory():
                found = exact_expert_linear(
                    x_RI[: 2 * rows], tiled, chosen, 1, torch.float32, gated=False, pairs=pairs, tile=tile
                )
            if not torch.equal(found, expected[: 2 * rows]):
                yield f"second layer, {rows} rows, {tile}"


def of_both_layers(name: str) -> Iterator[str]:
    """Rows alone and among others, few and many, rounded and not."""
    down = weight_of(name, 8, ANY_LEAF, num_experts=4)
    gate_up = random_packed(FORMATS[name], 2 * down.num_in, 64, device="cpu", seed=2, num_experts=4, leaves=1)
    experts = TiledExactExperts(tiles_of(with_even_numbers(gate_up)), tiles_of(down))
    generator = torch.Generator().manual_seed(1)
    chosen_TK = torch.rand(17, 4, generator=generator).argsort(dim=1)[:, :2].contiguous()
    x_TH = torch.randn(17, 64, generator=generator) / 16
    with poisoned_memory():
        whole_TKH = experts.outputs(x_TH, chosen_TK)
        few_TKH = experts.outputs(x_TH[:3], chosen_TK[:3])
        wide_TKH = experts.subtrees(x_TH[:3], chosen_TK[:3])
    # Few rows lie on the tile products' other side, for which a CPU adds up in another order than a card does.
    if relative_error(few_TKH, whole_TKH[:3]) > 1e-6 or not torch.equal(wide_TKH, few_TKH):
        yield "both layers"
    if not whole_TKH.isfinite().all() or not whole_TKH.abs().max() > 0:
        yield "both layers give nothing"


if __name__ == "__main__":
    patch_language_once()
    main()
    print("done")
