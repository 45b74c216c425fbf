"""How one quantized layer lies on disk (docs/quantized.md): its tensors, their shapes, and what share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from gemray_kernels.packed_weight import FP8, INT4, INT8, INT8_PACKED, NVFP4, Code

ACCEPTED = (
    "compressed-tensors pack-quantized int4 and int8, int-quantized, float-quantized FP8 (tensor, channel, block), "
    "nvfp4-pack-quantized, and modelopt NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO"
)

_SPREAD_OF_CODES = {"int4": 4.61, "int8": 73.9, "fp8": 16.0, "nvfp4": 2.93}
"""Standard deviations of random codes (`checkpoint.random_weights`)."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The tensors of a linear layer, named below the layer's own name."""

    title: str
    code: Code
    group: int | None
    """Inputs that share a scale; None for all of a row."""
    rows: int | None = 1
    """Outputs that share a scale; None for all."""
    codes_name: str
    scale_name: str = "weight_scale"
    row_scale_name: str | None = None
    """A second scale, of the scales."""
    row_scale_divides: bool = False
    activations: str | None = None
    """What the recipe would round activations to, in words; they are computed in the model's dtype."""

    def group_of(self, num_in: int) -> int:
        """Inputs that share a scale, in a layer of so many."""
        return num_in if self.group is None else self.group

    def scale_shape(self, num_out: int, num_in: int) -> tuple[int, int]:
        """Shape of the scales on disk."""
        return (1 if self.rows is None else ceil(num_out / self.rows), ceil(num_in / self.group_of(num_in)))

    def codes_shape(self, num_out: int, num_in: int) -> tuple[int, int]:
        """Shape of the codes on disk."""
        return (num_out, ceil(num_in / self.code.per_word))

    def random_scale(self, num_in: int) -> float:
        """The scale that gives random codes the spread of random plain weights."""
        return 1 / (sqrt(num_in) * _SPREAD_OF_CODES[self.code.name])


def packed_int(bits: int, group: int | None, activations: str | None) -> WeightFormat:
    """compressed-tensors ``pack-quantized``."""
    of = "per channel" if group is None else f"group {group}"
    return WeightFormat(
        title=f"int{bits} {of}",
        code={4: INT4, 8: INT8_PACKED}[bits],
        group=group,
        codes_name="weight_packed",
        activations=activations,
    )


def plain_int8(group: int | None, rows: int | None, activations: str | None) -> WeightFormat:
    """compressed-tensors ``int-quantized``: a byte a number."""
    of = "per tensor" if rows is None else "per channel" if group is None else f"group {group}"
    return WeightFormat(
        title=f"int8 {of}", code=INT8, group=group, rows=rows, codes_name="weight", activations=activations
    )


def fp8(group: int | None, rows: int | None, activations: str | None) -> WeightFormat:
    """FP8 (e4m3) of either library, with a scale a tensor, a channel or a block."""
    of = "per tensor" if rows is None else "per channel" if group is None else f"blocks {rows}x{group}"
    return WeightFormat(
        title=f"fp8 {of}", code=FP8, group=group, rows=rows, codes_name="weight", activations=activations
    )


def nvfp4(activations: str | None) -> WeightFormat:
    """compressed-tensors ``nvfp4-pack-quantized``, whose global scale divides."""
    return WeightFormat(
        title="nvfp4",
        code=NVFP4,
        group=16,
        codes_name="weight_packed",
        row_scale_name="weight_global_scale",
        row_scale_divides=True,
        activations=activations,
    )


def modelopt_nvfp4(activations: str | None) -> WeightFormat:
    """modelopt's NVFP4, whose second scale multiplies."""
    return WeightFormat(
        title="nvfp4 (modelopt)",
        code=NVFP4,
        group=16,
        codes_name="weight",
        row_scale_name="weight_scale_2",
        activations=activations,
    )
