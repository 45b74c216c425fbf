"""Fast products of 65 to 256 rows on CUDA: every tile against float64, and a row beside any others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.verify_rows import VerifyRowsTile, verify_rows_gated, verify_rows_linear
from support.kernels.kernel_parity import poisoned_memory, relative_error

pytestmark = pytest.mark.gpu

SHAPES = {
    "31B o": (5376, 8192),
    "inputs that no step divides, and outputs that no tile does": (2800, 2104),
    "few outputs": (80, 2560),
    "tiles enough for every program to take several": (43008, 2560),
}
"""Outputs and inputs."""
TILES = (
    VerifyRowsTile(1, 160),
    VerifyRowsTile(2, 80),
    VerifyRowsTile(2, 160, splits=3),
    VerifyRowsTile(3, 160),
    VerifyRowsTile(3, 128, splits=2),
)
ROWS = (1, 65, 80, 128, 129, 150, 160)


def label(tile: VerifyRowsTile) -> str:
    """A tile's name among tests."""
    return f"{tile.groups}g{tile.width}s{tile.splits}"


def inputs_of(name: str) -> tuple[Tensor, Tensor]:
    """Rows of many magnitudes, and the weight."""
    num_out, num_in = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(num_out + num_in)
    x = torch.randn(max(ROWS), num_in, generator=generator, device="cuda")
    x *= torch.randn(max(ROWS), num_in, generator=generator, device="cuda").exp()
    weight = torch.randn(num_out, num_in, generator=generator, device="cuda") * num_in**-0.5
    return x.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tile", TILES, ids=label)
def test_summands_add_up_to_the_product(tile: VerifyRowsTile, name: str) -> None:
    x, weight = inputs_of(name)
    expected = x.double() @ weight.double().t()
    most = min(tile.width, len(x))
    with poisoned_memory():
        together = verify_rows_linear(x[:most], weight, tile, out_dtype=torch.float32)
        assert len(together) == tile.splits
        assert relative_error(together.sum(0), expected[:most]) < 1e-5
        for rows in (rows for rows in ROWS if rows <= tile.width):
            alone = verify_rows_linear(x[:rows], weight, tile, out_dtype=torch.float32)
            assert torch.equal(alone, together[:, :rows]), rows
        if tile.splits == 1:
            rounded = verify_rows_linear(x[:most], weight, tile, out_dtype=torch.bfloat16)
            assert torch.equal(rounded, together.bfloat16())


@pytest.mark.parametrize("gate", [Gate.GELU, Gate.SILU])
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.splits == 1], ids=label)
def test_gates_round_as_separate_kernels(tile: VerifyRowsTile, gate: Gate) -> None:
    act = gelu_tanh_and_mul if gate is Gate.GELU else silu_and_mul
    for name in SHAPES:
        x, weight = inputs_of(name)
        for rows in (rows for rows in ROWS if rows <= tile.width):
            with poisoned_memory():
                plain = verify_rows_linear(x[:rows], weight, tile, out_dtype=torch.bfloat16)[0]
                found = verify_rows_gated(x[:rows], weight, tile, gate)
            assert torch.equal(found, act(plain)), (name, rows)


def test_calls_one_behind_the_other_do_not_mix() -> None:
    """A kernel that starts early reads rows that the one before it writes."""
    x, weight = inputs_of("31B o")
    x, square = x[:160], weight[:, :5376].contiguous()
    tile = VerifyRowsTile(2, 160)

    def chain(wait: bool) -> Tensor:
        found = verify_rows_linear(x, weight, tile, out_dtype=torch.bfloat16)[0]
        for _ in range(3):
            if wait:
                torch.cuda.synchronize()
            found = verify_rows_linear(found, square, tile, out_dtype=torch.bfloat16)[0]
        return found

    expected = chain(wait=True)
    for _ in range(20):
        assert torch.equal(chain(wait=False), expected)
