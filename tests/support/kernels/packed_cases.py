"""Packed weights of any format with random numbers, for tests and measurements of kernels.

Shape legend: T rows, I inputs, O outputs, W words of codes a row, G groups of inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight, exact_tiling_of, laid_out, tiling_of
from gemray_kernels.packed_weight import FP8, INT4, INT8, INT8_PACKED, NVFP4, Code, PackedWeight, groups_of, words_of


@dataclass(frozen=True)
class PackedFormat:
    """How the weights of a published checkpoint are packed."""

    name: str
    code: Code
    group: int | None
    """Inputs that share a scale; None for all of a row."""
    scale_dtype: torch.dtype = torch.bfloat16
    row_scale: Literal["divides", "multiplies"] | None = None


FORMATS = {
    form.name: form
    for form in (
        PackedFormat("int4 group 32", INT4, 32),
        PackedFormat("int4 group 128", INT4, 128),
        PackedFormat("int8 channel", INT8, None),
        PackedFormat("int8 packed channel", INT8_PACKED, None),
        PackedFormat("fp8 channel", FP8, None),
        PackedFormat("fp8 channel float32", FP8, None, torch.float32),
        PackedFormat("fp8 block 128", FP8, 128, torch.float32),
        PackedFormat("nvfp4", NVFP4, 16, torch.float8_e4m3fn, "divides"),
        PackedFormat("nvfp4 modelopt", NVFP4, 16, torch.float8_e4m3fn, "multiplies"),
    )
}

EXPERTS = ("int4 group 32", "int8 channel", "fp8 block 128", "nvfp4")
"""Formats of which experts are tried."""


def random_packed(
    form: PackedFormat,
    num_out: int,
    num_in: int,
    *,
    device: str,
    seed: int = 0,
    first: int = 0,
    num_experts: int | None = None,
    leaves: int | None = None,
) -> PackedWeight:
    """A weight of numbers of about ``1 / sqrt(num_in)``, with room for its tiling; some scales of nvfp4 are zero.

    Args:
        form: how it is packed.
        num_out: outputs.
        num_in: inputs.
        device: where it lies.
        seed: of its numbers.
        first: place of its first input among a whole weight's.
        num_experts: length of a leading dimension.
        leaves: into which exact numerics cut its inputs; None is the tiling of fast ones.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lead = () if num_experts is None else (num_experts,)
    group = first + num_in if form.group is None else form.group
    words, groups = words_of(form.code, first, num_in), groups_of(group, first, num_in)
    code_shape, scale_shape = (num_out, words.stop - words.start), (num_out, groups.stop - groups.start)
    layout = (form.code, group, form.scale_dtype, first, num_in)
    tiling = tiling_of(*layout) if leaves is None else exact_tiling_of(*layout, leaves)
    rows = prod((*lead, num_out))

    def held(content: Tensor, row_bytes: int) -> Tensor:
        memory = torch.empty(max(content.nbytes, rows * row_bytes), dtype=torch.uint8, device=device)
        view = memory[: content.nbytes].view(content.dtype).view(content.shape)
        return view.copy_(content)

    spread = {"int4": 4.6, "int8": 74.0, "fp8": 16.0, "nvfp4": 2.9}[form.code.name] * num_in**0.5
    scale = 0.5 + torch.rand(*lead, *scale_shape, generator=generator, device=device)
    row_scale = None
    if form.row_scale is None:
        scale /= spread
    else:
        scale = 2.0 ** torch.randint(-8, 8, scale.shape, generator=generator, device=device) * scale
        scale.view(-1)[::97] = 0
        row_scale = 0.5 + torch.rand(*lead, num_out, generator=generator, device=device)
        row_scale = row_scale * (32 * spread) if form.row_scale == "divides" else row_scale / (32 * spread)
    return PackedWeight(
        code=form.code,
        codes_OW=held(_codes(form.code, (*lead, *code_shape), generator), 0 if tiling is None else tiling.code_bytes),
        scale_OG=held(scale.to(form.scale_dtype), 0 if tiling is None else tiling.scale_bytes),
        row_scale_O=row_scale,
        row_scale_divides=form.row_scale == "divides",
        group=group,
        first=first,
        num_in=num_in,
        tiling=tiling,
    )


def tiled(name: str, num_out: int, num_in: int) -> TiledWeight:
    """A random weight on the CPU, laid out as kernels read it."""
    weight = random_packed(FORMATS[name], num_out, num_in, device="cpu")
    assert weight.tiling is not None
    return laid_out(weight, weight.tiling)


def of_shape(name: str, num_out: int, num_in: int) -> TiledWeight:
    """A weight of which nothing but its shape is right."""
    small = tiled(name, 64, 512)
    units = -(-num_in // (512 // small.words_BOC.shape[0]))
    return replace(
        small,
        words_BOC=torch.empty(units, num_out, small.words_BOC.shape[2], dtype=torch.int16),
        scale_BO=torch.empty(units, num_out, dtype=small.scale_BO.dtype),
        factor_O=torch.empty(num_out),
        num_in=num_in,
    )


def with_even_numbers(weight: PackedWeight) -> PackedWeight:
    """The same weight, in place, with numbers that are small multiples of powers of two.

    bfloat16 holds each of them, and sums of some hundred products with small integers are exact in float32.
    """
    if weight.code.word.is_floating_point:
        weight.codes_OW.copy_((weight.codes_OW.float() / 4).round().clamp(-15, 15))
    scale = weight.scale_OG.float()
    power = scale.log2().round()
    power = (power - power[power.isfinite()].median()).clamp(-1, 1)
    weight.scale_OG.copy_(torch.where(scale > 0, power.exp2(), 0.0))
    if weight.row_scale_O is not None:
        weight.row_scale_O.copy_(weight.row_scale_O.log2().round().exp2())
    return weight


def copied(weight: PackedWeight) -> PackedWeight:
    """The same weight in memory of its own, that of the other may be laid out anew."""
    return replace(weight, codes_OW=weight.codes_OW.clone(), scale_OG=weight.scale_OG.clone(), tiling=None)


def _codes(code: Code, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    device = generator.device
    if code.word.is_floating_point:
        return (torch.randn(shape, generator=generator, device=device) * 16).to(code.word)
    bounds = torch.iinfo(code.word)
    return torch.randint(bounds.min, bounds.max + 1, shape, dtype=code.word, device=device, generator=generator)
