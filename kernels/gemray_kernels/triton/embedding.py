"""Lookups in tables that are split over ranks, in one Triton kernel each, rounded as in `reference.embedding`.

Shape legend: T rows, H width of a table, V local rows of it, B a block of its columns, S summands, L layers, P width of
a per-layer embedding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.slot_tables import Columns
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.parts import total

BLOCK = 1024


def embed(
    token_ids_T: Tensor, table_VH: Tensor, columns: Columns, scale: float, vocab_size: int | None = None
) -> Tensor:
    """As `gemray_kernels.reference.embedding.embed`."""
    require_contiguous(token_ids=token_ids_T)
    require_rows(table=table_VH)
    num_rows, width = len(token_ids_T), table_VH.shape[1]
    out_TH = torch.empty(num_rows, width, dtype=table_VH.dtype, device=table_VH.device)
    early = starts_early(table_VH)
    if num_rows:
        _embed_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            token_ids_T,
            table_VH,
            out_TH,
            width,
            table_VH.stride(0),
            float(scale),
            columns.first_id,
            columns.num_ids,
            columns.first_added_id,
            columns.num_added,
            columns.added_column,
            -1 if vocab_size is None else vocab_size,
            BLOCK=BLOCK,
            EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
    return out_TH


def per_layer_inputs(context_STO: Tensor, tokens_TO: Tensor, norm: Norm, context_scale: float) -> Tensor:
    """As `gemray_kernels.reference.embedding.per_layer_inputs`."""
    if norm.round_before_weight or norm.factor is not None:
        raise ValueError(f"{norm}: a norm that rounds once is allowed")
    require_rows(context=context_STO, tokens=tokens_TO)
    require_contiguous(weight=norm.weight_D)
    num_summands, num_rows, num_outputs = context_STO.shape
    width = len(norm.weight_D)
    out_TLP = torch.empty(num_rows, num_outputs // width, width, dtype=tokens_TO.dtype, device=tokens_TO.device)
    early = starts_early(tokens_TO)
    if num_rows:
        _per_layer_inputs_kernel[(num_rows, num_outputs // width)](
            context_STO,
            tokens_TO,
            norm.weight_D,
            out_TLP,
            float(context_scale),
            norm.eps,
            context_STO.stride(0),
            context_STO.stride(1),
            tokens_TO.stride(0),
            num_outputs,
            SUMMANDS=num_summands,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            EARLY=early,
            num_warps=1,
            enable_fp_fusion=False,
            launch_pdl=early,
        )
    return out_TLP


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["first_id", "num_ids", "first_added_id", "num_added", "added_column", "vocab_size"]
)
def _embed_kernel(  # type: ignore[no-untyped-def]
    token_ids_T,
    table_VH,
    out_TH,
    width,
    table_stride,
    scale,
    first_id,
    num_ids,
    first_added_id,
    num_added,
    added_column,
    vocab_size,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_B = h_B < width
    wait_for_inputs(EARLY)
    token = tl.load(token_ids_T + row)
    token = tl.where((vocab_size >= 0) & ((token < 0) | (token >= vocab_size)), 0, token)
    in_first = (token >= first_id) & (token < first_id + num_ids)
    in_added = (token >= first_added_id) & (token < first_added_id + num_added)
    at = tl.where(in_first, token - first_id, tl.where(in_added, token - first_added_id + added_column, 0))
    x_B = tl.load(table_VH + at * table_stride + h_B, mask=inside_B, other=0.0).to(tl.float32)
    x_B = tl.where(in_first | in_added, x_B * scale, 0.0)
    tl.store(out_TH + row * width + h_B, x_B.to(out_TH.dtype.element_ty), mask=inside_B)


@triton.jit  # type: ignore[untyped-decorator]
def _per_layer_inputs_kernel(  # type: ignore[no-untyped-def]
    context_STO,
    tokens_TO,
    weight_P,
    out_TO,
    context_scale,
    eps,
    summand_stride,
    row_stride,
    tokens_stride,
    num_outputs,
    SUMMANDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_P = tl.arange(0, BLOCK)
    inside_P = p_P < WIDTH
    at_P = tl.program_id(1) * WIDTH + p_P
    dtype = out_TO.dtype.element_ty
    weight_P = tl.load(weight_P + p_P, mask=inside_P, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    x_P = total(context_STO + row * row_stride + at_P, summand_stride, inside_P, 0.0, SUMMANDS)
    x_P = (x_P.to(dtype).to(tl.float32) * context_scale).to(dtype).to(tl.float32)
    x_P = x_P * (1.0 / tl.sqrt_rn(tl.sum(x_P * x_P, axis=0) / WIDTH + eps)) * weight_P
    token_P = tl.load(tokens_TO + row * tokens_stride + at_P, mask=inside_P, other=0.0).to(tl.float32)
    x_P = (x_P.to(dtype).to(tl.float32) + token_P).to(dtype).to(tl.float32)
    tl.store(out_TO + row * num_outputs + at_P, (x_P * 0.7071067811865476).to(dtype), mask=inside_P)
