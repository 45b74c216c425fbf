"""Run by `test_triton_packed` in a process of its own: prints the relative error of every packed product."""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.packed_tiles import laid_out
from gemray_kernels.reference.activation import gelu_tanh_and_mul
from gemray_kernels.reference.experts import gated_experts
from gemray_kernels.reference.packed_linear import dequantized
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_experts import TiledExperts
from gemray_kernels.triton.packed_linear import PackedTile, packed_gated_linear_in_tiles, packed_linear_in_tiles
from support.kernels.kernel_parity import poisoned_memory, relative_error
from support.kernels.packed_cases import EXPERTS, FORMATS, copied, random_packed
from support.kernels.quick_interpreter import patch_language_once

CASES = ((48, 320, 0), (48, 256, 128), (32, 704, 0))
"""Outputs and inputs, whole units of them or not (of NVFP4 small ones, large ones, or also a part of a large one), from
which place of a whole weight on."""


def main() -> None:
    """Float32 rows: interpreted bfloat16 is truncated, so only float32 says something about digits."""
    for name, form in FORMATS.items():
        for num_out, num_in, first in CASES:
            weight = random_packed(form, num_out, num_in, device="cpu", first=first)
            assert weight.tiling is not None
            wide_OI = dequantized(copied(weight), torch.float64)
            tiled = laid_out(weight, weight.tiling)
            x_TI = torch.randn(5, num_in, generator=torch.Generator().manual_seed(num_in))
            expected_TO = x_TI.double() @ wide_OI.T
            for weight_first in (num_in != 256,):
                tile = PackedTile(32, 4, 3, weight_first=weight_first)
                halves = PackedTile(32, 4, 3, splits=2, weight_first=weight_first)
                with poisoned_memory():
                    found: dict[str, tuple[Tensor, Tensor]] = {
                        "summands": (
                            packed_linear_in_tiles(x_TI, tiled, halves, out_dtype=torch.float32).sum(0),
                            expected_TO,
                        ),
                        "from 16 on": (
                            packed_linear_in_tiles(x_TI, tiled, tile, out_dtype=torch.float32, first=16)[0],
                            expected_TO[:, 16:],
                        ),
                        "gated": (
                            packed_gated_linear_in_tiles(x_TI, tiled, tile, Gate.GELU),
                            gelu_tanh_and_mul(expected_TO),
                        ),
                    }
                for kind, (result, expected) in found.items():
                    print(f"{name}, {num_in} inputs, {kind}", relative_error(result, expected), sep="\t")
    for name in EXPERTS:
        gate_up = random_packed(FORMATS[name], 64, 256, device="cpu", num_experts=6)
        down = random_packed(FORMATS[name], 96, 32, device="cpu", seed=1, num_experts=6)
        assert gate_up.tiling is not None
        assert down.tiling is not None
        wide = [dequantized(copied(weight), torch.float64) for weight in (gate_up, down)]
        experts = TiledExperts(laid_out(gate_up, gate_up.tiling), laid_out(down, down.tiling))
        for rows in (3, 20):
            generator = torch.Generator().manual_seed(rows)
            x_TH, weights_TK = torch.randn(rows, 256, generator=generator), torch.rand(rows, 2, generator=generator)
            experts_TK = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
            expected = gated_experts(x_TH.double(), weights_TK.double(), experts_TK, *wide)
            with poisoned_memory():
                result = experts.weighted_sum(x_TH, weights_TK, experts_TK)
            print(f"{name}, experts, {rows} rows", relative_error(result, expected), sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
