"""Which implementation of each kernel a device and dtype use, chosen once for a model and handed to its layers.

The attention kernel is not here: it is chosen by name, with reasons (`gemray_workers.attention.choice`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gemray_kernels.numerics import Numerics
from gemray_kernels.packed_product import ExactExpertProducts, PackedExpertProducts, PackedProduct
from gemray_kernels.packed_weight import Code, PackedWeight, Tiling
from gemray_kernels.product_starts import NOT_AHEAD, ProductStarts
from gemray_kernels.reference import (
    attention_inputs,
    cycle_rows,
    embedding,
    exact_experts,
    exact_linear,
    exact_packed,
    experts,
    layer_norms,
    linear,
    output_rows,
    packed_linear,
    rms_norm,
    rope,
    routing,
    settled_rows,
)
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.sequence_tables import PageTables, QueryLayout, RowLayout, SequenceTables, Settled
from gemray_kernels.slot_tables import Columns


@dataclass(frozen=True, kw_only=True)
class ExactProducts:
    """Products whose bits follow a row's own inputs alone (`gemray_kernels.numerics`).

    The last argument is the number of leaves of these inputs, a rank's share of them where ranks split the inputs.
    Signatures and results are those of `gemray_kernels.reference.exact_linear`, `exact_experts` and `exact_packed`.
    """

    linear: Callable[[Tensor, Tensor, int], Tensor]
    summands: Callable[[Tensor, Tensor, int], Tensor]
    wide_summands: Callable[[Tensor, Tensor, int], Tensor]
    gelu_linear: Callable[[Tensor, Tensor, int], Tensor]
    silu_linear: Callable[[Tensor, Tensor, int], Tensor]
    gated_projection: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    expert_outputs: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    expert_subtrees: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    tiling: Callable[[Code, int, torch.dtype, int, int, int, torch.dtype], Tiling | None]
    packed_product: Callable[[PackedWeight, int], PackedProduct]
    packed_experts: Callable[[PackedWeight, PackedWeight, int], ExactExpertProducts]


class AddThenNorms(Protocol):
    """Type of `gemray_kernels.reference.layer_norms.add_then_norms`."""

    def __call__(
        self,
        residual_TD: Tensor,
        summands_STD: Tensor,
        post_norm: Norm | None,
        scale: Tensor | None,
        norms: Sequence[Norm],
        *,
        lets_at_once: bool = False,
    ) -> tuple[Tensor, ...]:
        """The stream behind a product, and norms of it."""
        ...


class AddExpertsThenNorms(Protocol):
    """Type of `gemray_kernels.reference.layer_norms.add_experts_then_norms`."""

    def __call__(
        self,
        residual_TD: Tensor,
        dense_STD: Tensor,
        dense_norm: Norm,
        routed_TKD: Tensor,
        weights_TK: Tensor,
        routed_norm: Norm,
        post_norm: Norm,
        scale: Tensor | None,
        norms: Sequence[Norm],
        *,
        lets_at_once: bool = False,
    ) -> tuple[Tensor, ...]:
        """The stream behind a dense product and experts, and norms of it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation of each; signatures and results are those of the references."""

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    rms_norm_then_scale: Callable[[Tensor, Tensor, float], Tensor]
    gated_experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor], Tensor]
    summands: Callable[[Tensor, Tensor], Tensor]
    wide_summands: Callable[[Tensor, Tensor], Tensor]
    gelu_linear: Callable[[Tensor, Tensor], Tensor]
    silu_linear: Callable[[Tensor, Tensor], Tensor]
    gated_projection: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_then_norms: AddThenNorms
    add_experts_then_norms: AddExpertsThenNorms
    attention_inputs: Callable[[Tensor, Tensor, Tensor, int, Norm | None, KVWrite | None], Tensor]
    embed: Callable[[Tensor, Tensor, Columns, float, int | None], Tensor]
    per_layer_inputs: Callable[[Tensor, Tensor, Norm, float], Tensor]
    rope_tables: Callable[[Tensor, Sequence[Tensor], torch.dtype], tuple[tuple[Tensor, Tensor], ...]]
    route: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    expert_outputs: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    tiling: Callable[[Code, int, torch.dtype, int, int, torch.dtype], Tiling | None]
    packed_product: Callable[[PackedWeight], PackedProduct]
    packed_experts: Callable[[PackedWeight, PackedWeight], PackedExpertProducts]
    starts: ProductStarts = NOT_AHEAD
    """When the products of plain weights start."""
    exact: ExactProducts | None = None
    """Products in exact numerics; None where numerics are fast."""


class PackRows(Protocol):
    """Type of `gemray_kernels.reference.cycle_rows.pack_rows`."""

    def __call__(
        self,
        cut_5A: Tensor,
        tables: SequenceTables,
        pages: PageTables,
        *,
        num_rows: int,
        rectangle: tuple[int, int],
        block_mask: int | None,
    ) -> RowLayout:
        """Lay out the rows of a pass."""
        ...


class QueryRows(Protocol):
    """Type of `gemray_kernels.reference.cycle_rows.query_rows`."""

    def __call__(
        self,
        cut_5A: Tensor,
        tables: SequenceTables,
        pages: PageTables,
        *,
        num_drafting: int,
        num_drafts: int,
        delta: int,
    ) -> QueryLayout:
        """Lay out one query a sequence."""
        ...


class Settle(Protocol):
    """Type of `gemray_kernels.reference.settled_rows.settle`."""

    def __call__(
        self, cut_5A: Tensor, chosen_RQ: Tensor, tables: SequenceTables, verified: tuple[Tensor, Tensor] | None = None
    ) -> Settled:
        """Verify drafts and write what is emitted."""
        ...


@dataclass(frozen=True, kw_only=True)
class RowKernels:
    """What a cycle computes of integers, beside the model; signatures and results are those of the references."""

    cut_rows: Callable[[Tensor, SequenceTables], Tensor]
    pack_rows: PackRows
    cut_to_outputs: Callable[[Tensor, Tensor], Tensor]
    output_places: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    query_rows: QueryRows
    settle: Settle
    advance: Callable[[Tensor, Tensor, SequenceTables], None]
    write_drafts: Callable[[Tensor, Tensor, Tensor, SequenceTables], Tensor]
    keep_last_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    committed_places: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


REFERENCE_ROWS = RowKernels(
    cut_rows=cycle_rows.cut_rows,
    pack_rows=cycle_rows.pack_rows,
    cut_to_outputs=output_rows.cut_to_outputs,
    output_places=output_rows.output_places,
    query_rows=cycle_rows.query_rows,
    settle=settled_rows.settle,
    advance=settled_rows.advance,
    write_drafts=settled_rows.write_drafts,
    keep_last_rows=settled_rows.keep_last_rows,
    committed_places=settled_rows.committed_places,
)
"""Plain PyTorch, for every device."""


REFERENCE = Kernels(
    rms_norm=rms_norm.rms_norm,
    rms_norm_then_scale=rms_norm.rms_norm_then_scale,
    gated_experts=experts.gated_experts,
    linear=linear.linear,
    summands=linear.summands,
    wide_summands=linear.wide_summands,
    gelu_linear=linear.gelu_linear,
    silu_linear=linear.silu_linear,
    gated_projection=linear.gated_projection,
    add_then_norms=layer_norms.add_then_norms,
    add_experts_then_norms=layer_norms.add_experts_then_norms,
    attention_inputs=attention_inputs.attention_inputs,
    embed=embedding.embed,
    per_layer_inputs=embedding.per_layer_inputs,
    rope_tables=rope.rope_tables,
    route=routing.route,
    expert_outputs=routing.expert_outputs,
    tiling=packed_linear.no_tiling,
    packed_product=packed_linear.ReferenceProduct,
    packed_experts=packed_linear.ReferenceExperts,
)
"""Plain PyTorch, for every device and dtype."""

EXACT_REFERENCE = ExactProducts(
    linear=exact_linear.linear,
    summands=exact_linear.summands,
    wide_summands=exact_linear.wide_summands,
    gelu_linear=exact_linear.gelu_linear,
    silu_linear=exact_linear.silu_linear,
    gated_projection=exact_linear.gated_projection,
    expert_outputs=exact_experts.expert_outputs,
    expert_subtrees=exact_experts.expert_subtrees,
    tiling=exact_packed.no_tiling,
    packed_product=exact_packed.packed_product,
    packed_experts=exact_packed.packed_experts,
)
"""Elementwise PyTorch, for every device and dtype."""


def kernels_for(device: torch.device, dtype: torch.dtype, numerics: Numerics = Numerics.FAST) -> Kernels:
    """Triton on CUDA for the dtypes that are served; the references for the rest, float64 among it."""
    kernels = _fast_kernels(device, dtype)
    if numerics is Numerics.FAST:
        return kernels
    known = kernels is not REFERENCE and torch.cuda.get_device_capability(device) == EXACT_CAPABILITY
    return replace(kernels, exact=triton_exact_products() if known else EXACT_REFERENCE)


def _fast_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float32):
        return REFERENCE
    kernels = triton_kernels()
    capability = torch.cuda.get_device_capability(device)
    if capability < PACKED_CAPABILITY:
        return replace(kernels, tiling=packed_linear.no_tiling)
    if capability > PACKED_CAPABILITY:
        from gemray_kernels.triton.packed_products import packed_product

        return replace(kernels, packed_product=partial(packed_product, on_hopper=False))
    return kernels


PACKED_CAPABILITY = (9, 0)
"""What kernels of packed weights need: products of two bfloat16 numbers in a register. Those of prompts are written in
this capability's instructions, which later ones have not."""


EXACT_CAPABILITY = (9, 0)
"""Where all tiles of tensor instructions are known to add up in one order; elsewhere the references stand in."""


def triton_kernels() -> Kernels:
    """Every kernel in Triton. Imports triton, which only CUDA builds of torch bring along."""
    from gemray_kernels.triton import (
        attention_inputs,
        embedding,
        gated_projection,
        layer_norms,
        linear_choice,
        packed_experts,
        packed_products,
        routing,
    )
    from gemray_kernels.triton import experts as triton_experts
    from gemray_kernels.triton import rms_norm as triton_rms_norm
    from gemray_kernels.triton import rope as triton_rope

    return Kernels(
        rms_norm=triton_rms_norm.rms_norm,
        rms_norm_then_scale=triton_rms_norm.rms_norm_then_scale,
        gated_experts=triton_experts.gated_experts,
        linear=linear_choice.linear,
        summands=linear_choice.summands,
        wide_summands=linear_choice.wide_summands,
        gelu_linear=linear_choice.gelu_linear,
        silu_linear=linear_choice.silu_linear,
        gated_projection=gated_projection.gated_projection,
        add_then_norms=layer_norms.add_then_norms,
        add_experts_then_norms=layer_norms.add_experts_then_norms,
        attention_inputs=attention_inputs.attention_inputs,
        embed=embedding.embed,
        per_layer_inputs=embedding.per_layer_inputs,
        rope_tables=triton_rope.rope_tables,
        route=routing.route,
        expert_outputs=triton_experts.expert_outputs,
        tiling=packed_products.tiling,
        packed_product=packed_products.packed_product,
        packed_experts=packed_experts.packed_experts,
        starts=linear_choice.STARTS,
    )


def triton_exact_products() -> ExactProducts:
    """Every exact product in Triton. Imports triton, which only CUDA builds of torch bring along."""
    from gemray_kernels.triton import exact_experts, exact_products
    from gemray_kernels.triton import exact_packed as triton_exact_packed

    return ExactProducts(
        linear=exact_products.linear,
        summands=exact_products.summands,
        wide_summands=exact_products.wide_summands,
        gelu_linear=exact_products.gelu_linear,
        silu_linear=exact_products.silu_linear,
        gated_projection=exact_products.gated_projection,
        expert_outputs=exact_experts.expert_outputs,
        expert_subtrees=exact_experts.expert_subtrees,
        tiling=triton_exact_packed.tiling,
        packed_product=triton_exact_packed.packed_product,
        packed_experts=triton_exact_packed.packed_experts,
    )


def row_kernels_for(device: torch.device) -> RowKernels:
    """Triton on CUDA, for every dtype; the references elsewhere."""
    return triton_row_kernels() if device.type == "cuda" else REFERENCE_ROWS


def triton_row_kernels() -> RowKernels:
    """Every one in Triton. Imports triton, which only CUDA builds of torch bring along."""
    from gemray_kernels.triton import cycle_rows as triton_cycle_rows
    from gemray_kernels.triton import output_rows as triton_output_rows
    from gemray_kernels.triton import settled_rows as triton_settled_rows

    return RowKernels(
        cut_rows=triton_cycle_rows.cut_rows,
        pack_rows=triton_cycle_rows.pack_rows,
        cut_to_outputs=triton_output_rows.cut_to_outputs,
        output_places=triton_output_rows.output_places,
        query_rows=triton_cycle_rows.query_rows,
        settle=triton_settled_rows.settle,
        advance=triton_settled_rows.advance,
        write_drafts=triton_settled_rows.write_drafts,
        keep_last_rows=triton_settled_rows.keep_last_rows,
        committed_places=triton_settled_rows.committed_places,
    )
