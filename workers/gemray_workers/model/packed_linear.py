"""Linear layers whose weights stay packed, and what of a checkpoint fills one rank's part (docs/quantized.md).

A part of the inputs that begins or ends inside a word or a group takes the whole word and the group's scale, on both
ranks. Scales that rows share on disk are repeated, one for each row, so that stacked layers keep their own.

Shape legend: T rows, I inputs, O outputs, S summands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import PackedProduct
from gemray_kernels.packed_weight import PackedWeight, groups_of, words_of
from gemray_kernels.table import Kernels
from gemray_workers.checkpoint.quantized.formats import WeightFormat
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.random_weights import packed_gain
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.model.filled_products import FilledProducts
from gemray_workers.model.linear_method import LinearWeight
from gemray_workers.model.weight_sharding import Part, WeightSharding


class PackedLinearWeight(LinearWeight):
    """One rank's part of the weights of layers of the same input and the same format.

    It multiplies once a checkpoint has filled it: kernels may then lay it out anew.
    """

    def __init__(self, weight: PackedWeight, targets: Sequence[WeightTarget], kernels: Kernels, leaves: int) -> None:
        exact = kernels.exact

        def lay_out() -> PackedProduct:
            return kernels.packed_product(weight) if exact is None else exact.packed_product(weight, leaves)

        self._products = FilledProducts(lay_out)
        self._targets = [replace(target, then=self._products.fill) for target in targets]

    @override
    def product(self, x_TI: Tensor) -> Tensor:
        return self._products.now.linear(x_TI)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return self._products.now.wide_summands(x_TI)

    @override
    def summands(self, x_TI: Tensor, first: int = 0, length: int | None = None) -> Tensor:
        return self._products.now.summands(x_TI, first)[..., :length]

    @override
    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self._products.now.gated_projection(summands_STI, factor_TI)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        return self._products.now.gelu(x_TI)

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        return self._products.now.silu(x_TI)

    @override
    def comes_ahead(self, num_rows: int) -> bool:
        return self._products.now.comes_ahead(num_rows)

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return list(self._targets)


def packed_linear_weight(
    recipe: Recipe,
    form: WeightFormat,
    outputs: Sequence[tuple[str, Part]],
    inputs: Part,
    sharding: WeightSharding,
    leaves: int = 1,
) -> PackedLinearWeight:
    """The stacked weights of layers, of each of which the rank holds a part of the outputs and the same inputs.

    `leaves` are those of the rank's inputs in exact numerics.
    """
    names = [name for name, _ in outputs]
    num_out = sum(part.length for _, part in outputs)
    weight = empty_packed(recipe, form, names, num_out, inputs, sharding, leaves=leaves)
    targets: list[WeightTarget] = []
    row = 0
    for name, part in outputs:
        targets += packed_targets(name, form, [(part, weight.rows(row, part.length))], inputs)
        row += part.length
    return PackedLinearWeight(weight, targets, sharding.kernels, leaves)


def empty_packed(
    recipe: Recipe,
    form: WeightFormat,
    names: Iterable[str],
    num_out: int,
    inputs: Part,
    sharding: WeightSharding,
    num_experts: int | None = None,
    leaves: int = 1,
) -> PackedWeight:
    """Memory that a checkpoint is to fill.

    Args:
        recipe: knows the dtype of the scales on disk, which they keep.
        form: of the layers.
        names: of the layers that share the memory.
        num_out: outputs on this rank.
        inputs: this rank's.
        sharding: where the memory lies.
        num_experts: length of a leading dimension.
        leaves: of the rank's inputs in exact numerics.
    """
    lead = () if num_experts is None else (num_experts,)
    group = form.group_of(inputs.whole)

    def empty(dtype: torch.dtype, *shape: int, room: int = 0) -> Tensor:
        """A tensor at the beginning of memory that has so many bytes a row at least."""
        size = prod((*lead, *shape)) * dtype.itemsize
        memory = torch.empty(max(size, prod((*lead, num_out)) * room), dtype=torch.uint8, device=sharding.device)
        return memory[:size].view(dtype).view(*lead, *shape)

    words = words_of(form.code, inputs.start, inputs.length)
    groups = groups_of(group, inputs.start, inputs.length)
    usual = torch.float8_e4m3fn if form.row_scale_name is not None else torch.bfloat16
    scale_dtype = recipe.scale_dtype((f"{name}.{form.scale_name}" for name in names), usual)
    layout = (form.code, group, scale_dtype, inputs.start, inputs.length)
    if (exact := sharding.kernels.exact) is not None:
        tiling = exact.tiling(*layout, leaves, sharding.dtype)
    else:
        tiling = sharding.kernels.tiling(*layout, sharding.dtype)
    code_room, scale_room = (0, 0) if tiling is None else (tiling.code_bytes, tiling.scale_bytes)
    return PackedWeight(
        code=form.code,
        codes_OW=empty(form.code.word, num_out, words.stop - words.start, room=code_room),
        scale_OG=empty(scale_dtype, num_out, groups.stop - groups.start, room=scale_room),
        row_scale_O=None if form.row_scale_name is None else empty(torch.float32, num_out),
        row_scale_divides=form.row_scale_divides,
        group=group,
        first=inputs.start,
        num_in=inputs.length,
        tiling=tiling,
    )


def packed_targets(
    name: str,
    form: WeightFormat,
    pieces: Sequence[tuple[Part, PackedWeight]],
    inputs: Part,
    num_experts: int | None = None,
) -> list[WeightTarget]:
    """What fills the memory of one layer.

    Args:
        name: of the layer, below the model's prefix.
        form: how it lies on disk.
        pieces: parts of the layer's outputs, each with the memory that it goes to.
        inputs: this rank's.
        num_experts: length of a leading dimension on disk and in memory.
    """
    num_out, num_in = pieces[0][0].whole, inputs.whole
    lead = () if num_experts is None else (num_experts,)
    every = tuple(slice(0, n) for n in lead)
    words = words_of(form.code, inputs.start, inputs.length)
    groups = groups_of(form.group_of(num_in), inputs.start, inputs.length)
    random_scale = form.random_scale(num_in) * packed_gain(name, num_in)
    codes = WeightTarget(
        f"{name}.{form.codes_name}",
        (*lead, *form.codes_shape(num_out, num_in)),
        tuple(
            Copy((*every, slice(part.start, part.start + part.length), words), memory.codes_OW)
            for part, memory in pieces
        ),
        role="codes",
        format=form.title,
        weights_each=form.code.per_word,
    )
    scale = WeightTarget(
        f"{name}.{form.scale_name}",
        (*lead, *form.scale_shape(num_out, num_in)),
        tuple(
            Copy((*every, rows, groups), memory.scale_OG[..., to, :], spread=True)
            for part, memory in pieces
            for rows, to in _shared_rows(form.rows, part)
        ),
        role="scale",
        format=form.title,
        weights_each=0,
        random_value=random_scale if form.row_scale_name is None else 1.0,
    )
    if form.row_scale_name is None:
        return [codes, scale]
    row_scale = WeightTarget(
        f"{name}.{form.row_scale_name}",
        (*lead, 1),
        tuple(
            Copy((*every, slice(0, 1)), memory.row_scale_O, spread=True)
            for _, memory in pieces
            if memory.row_scale_O is not None
        ),
        role="scale",
        format=form.title,
        weights_each=0,
        random_value=1 / random_scale if form.row_scale_divides else random_scale,
    )
    return [codes, scale, row_scale]


def _shared_rows(rows: int | None, part: Part) -> Iterator[tuple[slice, slice]]:
    """Rows of the scales on disk, and the outputs of this part that share them."""
    stop = part.start + part.length
    if rows == 1:
        yield slice(part.start, stop), slice(0, part.length)
    elif rows is None:
        yield slice(0, 1), slice(0, part.length)
    else:
        for block in range(part.start // rows, -(-stop // rows)):
            first, last = max(block * rows, part.start), min((block + 1) * rows, stop)
            yield slice(block, block + 1), slice(first - part.start, last - part.start)
