"""Scales of rows as one bfloat16 number or two that round a code's numbers as float32 does.

In exact numerics a number is ``value · factor`` in float32, rounded to bfloat16. Values have few digits, so that
``value · high`` rounds the same where a factor has no more digits than ``high`` holds; else ``value · high + (value ·
low)`` does, with its last sum rounded once, for some ``low`` near the rest of the factor. Both take two numbers at a
time in a register. Which ``low`` that is, is found by trying every value of the code.

NVFP4's values are products with a block's scale, of four digits. With a ``high`` of four digits a scale's product
with it is exact: ``value · (scale · high) + value · (scale · low)`` takes a product less for two numbers. Most factors
(97 of 100) have such parts, and a weight has one or a few different factors.

Shape legend: O outputs, N different factors, V values of a code, C scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling

_LEAST = 2.0**-60
_MOST: Mapping[CodeName, float] = {"int4": 2.0**35, "int8": 2.0**35, "fp8": 2.0**6, "nvfp4": 2.0**60}
"""Bounds of factors that are taken apart: beyond them a part or a product would leave bfloat16's range."""
_MOST_SHORT = 1.0
"""Bound of factors whose first part is multiplied with a kernel's scale, 2^127 at most."""
SHORT = 3
"""`TiledWeight.parts` of two of which the first is short."""
_CHUNK = 1 << 14
"""Factors that are tried at a time."""
_BLOCKS_FACTOR = {"fp8": 1.0}
"""Codes whose units may have a scale each, with what a kernel expects in the place of the row's."""


def with_parts(weight: TiledWeight) -> TiledWeight:
    """The weight with its factors in parts, where all of its rows have them."""
    if weight.scaling is Scaling.SUMS:
        return replace(weight, parts=1) if _are_short_scales(weight) else weight
    if weight.scaling is Scaling.EACH or (weight.code, weight.scaling) == ("int4", Scaling.CODES):
        return weight
    factor_N, which_O = torch.unique(weight.factor_O, return_inverse=True)
    if weight.code == "nvfp4" and not _is_short(factor_N).all():
        high_N, low_N, found_N = short_parts_of(factor_N)
        if found_N.all():
            return replace(weight, parts=SHORT, parts_O=(_bits(high_N) | _bits(low_N) << 16)[which_O])
    high_N, low_N, found_N = parts_of(factor_N, values_of(weight.code), _MOST[weight.code])
    if not found_N.all():
        return weight
    parts = 2 if low_N.any() else 1
    up = part_size(weight.code, parts)
    bits_N = _bits(high_N * up) | _bits(low_N * up) << 16
    return replace(weight, parts=parts, parts_O=bits_N[which_O])


def part_size(code: CodeName, parts: int) -> float:
    """What parts are multiplied with for kernels, whose numbers of a code are smaller by as much.

    e4m3's are ``value · 2^-120`` as they are masked out of their words. One part of int8 is multiplied with a masked
    code, ``code · 2^-133``, and the product is 2^-21 of the number.
    """
    if code == "fp8":
        return 2.0**120
    return 2.0**91 if code == "int8" and parts == 1 else 1.0


def values_of(code: CodeName) -> Tensor:
    """The sizes [V] of what a kernel multiplies with the factors of a row, float32."""
    size = 1 / UNITS[code].factor
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    if code == "fp8":
        return e4m3 * size
    if code == "nvfp4":
        e2m1 = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
        return (e2m1[:, None] * e4m3).flatten() * size
    return torch.arange(1, 9 if code == "int4" else 129) * size


def parts_of(factor_N: Tensor, values_V: Tensor, most: float = 2.0**60) -> tuple[Tensor, Tensor, Tensor]:
    """High and low parts of factors, float32 numbers that bfloat16 holds, and which factors have such parts.

    Args:
        factor_N: float32.
        values_V: float32 numbers of at most eight digits.
        most: of factors that are tried.
    """
    is_short_N, is_inside_N = _is_short(factor_N), _is_inside(factor_N, most)
    high_N, low_N = torch.where(is_short_N, factor_N, 0.0), torch.zeros_like(factor_N)
    found_N = is_short_N & is_inside_N
    places = (~is_short_N & is_inside_N).nonzero().squeeze(1)
    for first in range(0, len(places), _CHUNK):
        chunk = places[first : first + _CHUNK]
        high_N[chunk], low_N[chunk], found_N[chunk] = _tried(factor_N[chunk], values_V.to(factor_N.device))
    return high_N, low_N, found_N


def _tried(factor_N: Tensor, values_V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `parts_of`, of factors that need two."""
    wanted_NV = (factor_N[:, None] * values_V).bfloat16().double()
    high_N, low_N = factor_N.bfloat16().float(), torch.zeros_like(factor_N)
    found_N = torch.zeros_like(factor_N, dtype=torch.bool)
    for up in (0, 1, -1):
        for aside in sorted(range(-12, 13), key=abs):
            (open_N,) = (~found_N).nonzero(as_tuple=True)
            if not len(open_N):
                return high_N, low_N, found_N
            factor = factor_N[open_N]
            high = _stepped(factor.bfloat16(), up)
            low = _stepped((factor - high).bfloat16(), aside)
            rest_NV = (low[:, None] * values_V).bfloat16().double()  # of 16 digits, which float32 holds
            sums_NV = rounded_once((high[:, None] * values_V).double() + rest_NV)
            good = (sums_NV == wanted_NV[open_N]).all(1)
            high_N[open_N[good]], low_N[open_N[good]], found_N[open_N[good]] = high[good], low[good], True
    return high_N, low_N, found_N


def rounded_once(x: Tensor) -> Tensor:
    """float64 numbers of bfloat16's range rounded to the nearest that it holds: a conversion would do so twice."""
    bits = x.view(torch.int64)
    bits = bits + (1 << 44) - 1 + (bits >> 45 & 1)
    return (bits >> 45 << 45).view(torch.float64)


def short_parts_of(factor_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `parts_of` of e2m1's factors, with high parts whose products with scales are exact."""
    scale_C = 1 + torch.arange(8, device=factor_N.device) / 8
    value_V = torch.tensor([1, 1.5], device=factor_N.device)  # others are these times powers of two
    wanted_NCV = (factor_N[:, None, None] * (scale_C[:, None] * value_V)).bfloat16().double()
    high_N, low_N = torch.zeros_like(factor_N), torch.zeros_like(factor_N)
    found_N = torch.zeros_like(factor_N, dtype=torch.bool)
    is_inside_N = (factor_N >= _LEAST) & (factor_N <= _MOST_SHORT)
    digits_N, power_N = torch.frexp(factor_N)
    for up in (0, 1, -1):
        nearest_N = torch.ldexp((16 * digits_N).round() + up, power_N - 4)
        for aside in sorted(range(-12, 13), key=abs):
            (open_N,) = (~found_N & is_inside_N).nonzero(as_tuple=True)
            if not len(open_N):  # after two rounds as a rule: a start has hundreds of weights
                return high_N, low_N, found_N
            high = nearest_N[open_N]
            low = _stepped((factor_N[open_N] - high).bfloat16(), aside)
            rest_NC = (low[:, None] * scale_C).bfloat16().float()
            rest_NCV = (rest_NC[:, :, None] * value_V).bfloat16().double()
            sums_NCV = rounded_once((high[:, None] * scale_C)[:, :, None] * value_V + rest_NCV)
            good = (sums_NCV == wanted_NCV[open_N]).flatten(1).all(1)
            high_N[open_N[good]], low_N[open_N[good]], found_N[open_N[good]] = high[good], low[good], True
    return high_N, low_N, found_N


def _stepped(x: Tensor, steps: int) -> Tensor:
    """bfloat16 numbers so many neighbours on, away from zero, as float32."""
    return (x.view(torch.int16) + steps).view(torch.bfloat16).float()


def _bits(x: Tensor) -> Tensor:
    """Bits of float32 numbers that bfloat16 holds, as bfloat16 has them, in int32."""
    return x.contiguous().view(torch.int32) >> 16 & 0xFFFF


def _are_short_scales(weight: TiledWeight) -> bool:
    """Whether a kernel can take each unit's scale as a single part."""
    scale = weight.scale_BO
    taken = _is_short(scale) & _is_inside(scale, _MOST[weight.code])
    return bool(
        weight.code in _BLOCKS_FACTOR and (weight.factor_O == _BLOCKS_FACTOR[weight.code]).all() and taken.all()
    )


def _is_short(x: Tensor) -> Tensor:
    """Which float32 numbers bfloat16 holds."""
    return x.bfloat16().float() == x


def _is_inside(x: Tensor, most: float) -> Tensor:
    """Which numbers are 0 or of a size that is taken apart."""
    return (x == 0) | ((x.abs() >= _LEAST) & (x.abs() <= most))
