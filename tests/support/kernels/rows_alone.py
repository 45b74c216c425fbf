"""What lies between a model's products, on some rows of fixed inputs: a row's bits must not depend on the others.

Products come as summands, whose number follows the rows of a step and the ranks: here any number of them adds up to the
same totals, exactly.

Shape legend: T rows, S summands, D width of the stream, N query heads, K KV heads, O outputs, E experts, P width of a
per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.reference.rope import inverse_frequencies
from gemray_kernels.slot_tables import Columns
from gemray_kernels.table import Kernels

EPS = 1e-6
LEAVES = 8


@dataclass(frozen=True)
class Widths:
    """Sizes of a model's layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    per_layer: int


class RowsAlone:
    """Fixed inputs of `num_rows` rows, and what each kernel makes of some of them."""

    def __init__(self, widths: Widths, num_rows: int, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(widths.hidden + num_rows)
        self._widths, self._device, self._dtype = widths, device, dtype

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(dtype).to(device)

        def leaves(num_out: int) -> Tensor:
            """Small multiples of a sixteenth, so that every sum of them is exact in bfloat16."""
            return torch.randint(-31, 32, (LEAVES, num_rows, num_out), generator=generator).to(device) / 16

        stacked = (widths.heads + 2 * widths.kv_heads) * widths.head_dim
        self._residual_TD, self._scale = random(num_rows, widths.hidden), random(1)
        self._weights = [random(widths.hidden) for _ in range(5)]
        self._stream, self._qkv, self._context = (leaves(n) for n in (widths.hidden, stacked, 3 * widths.per_layer))
        self._logits = leaves(widths.experts)
        self._routed_TKD, self._mixing_TK = (
            random(num_rows, widths.top_k, widths.hidden),
            torch.rand(num_rows, widths.top_k, generator=generator).to(device),
        )
        self._head_weight, self._per_layer_weight = random(widths.head_dim), random(widths.per_layer)
        self._router_scale = random(widths.experts)
        self._tokens_TO = random(num_rows, 3 * widths.per_layer)
        self._table = random(300, widths.hidden)
        self._ids_T = torch.randint(0, 300, (num_rows,), generator=generator).to(device)
        self._positions_T = torch.randint(0, 131072, (num_rows,), generator=generator).to(device)
        self._frequencies = [
            inverse_frequencies(d, 1e6, partial_rotary_factor=f, device=device)
            for d, f in ((widths.head_dim, 1), (2 * widths.head_dim, 0.25))
        ]

    def outputs(self, kernels: Kernels, rows: slice, num_parts: int, *, rounded: bool = False) -> dict[str, Tensor]:
        """What every kernel makes of these rows, by name, rows first.

        Args:
            kernels: the implementation.
            rows: of the inputs.
            num_parts: into which totals are split, 1, 2, 4 or 8.
            rounded: a single part comes in the model's dtype, not in float32.
        """
        return dict(self._each(kernels, rows, num_parts, rounded))

    def _each(self, kernels: Kernels, rows: slice, num_parts: int, rounded: bool) -> Iterator[tuple[str, Tensor]]:
        wide = torch.promote_types(torch.float32, self._dtype)

        def parts(leaves_STO: Tensor, dtype: torch.dtype = self._dtype if rounded else wide) -> Tensor:
            grouped = leaves_STO[:, rows].unflatten(0, (num_parts, LEAVES // num_parts))
            return grouped.sum(1).to(dtype).contiguous()

        residual_TD = self._residual_TD[rows].contiguous()
        first, second, third, post, dense = (Norm(weight, EPS) for weight in self._weights)
        rounding = Norm(self._weights[1], EPS, round_before_weight=True, factor=0.25)
        yield "rms_norm", kernels.rms_norm(residual_TD, self._weights[0], EPS)
        stream_STD = parts(self._stream)
        yield from _numbered(
            "add_then_norms", kernels.add_then_norms(residual_TD, stream_STD, post, self._scale, [first])
        )
        yield from _numbered(
            "add_then_norms of three",
            kernels.add_then_norms(residual_TD, stream_STD, post, None, [first, rounding, third]),
        )
        routed_TKD, mixing_TK = self._routed_TKD[rows].contiguous(), self._mixing_TK[rows].to(wide).contiguous()
        yield from _numbered(
            "add_experts_then_norms",
            kernels.add_experts_then_norms(
                residual_TD, stream_STD, dense, routed_TKD, mixing_TK, second, post, self._scale, [first]
            ),
        )
        tables = kernels.rope_tables(self._positions_T[rows].contiguous(), self._frequencies, self._dtype)
        yield from _numbered("rope_tables", [half for pair in tables for half in pair])
        yield from self._attention_inputs(kernels, parts(self._qkv), *tables[0])
        columns = Columns(torch.zeros(0, dtype=torch.int64), 0, 300, 300, 300, 0)
        yield "embed", kernels.embed(self._ids_T[rows].contiguous(), self._table, columns, 7.3125, None)
        if self._widths.per_layer:
            norm = Norm(self._per_layer_weight, EPS)
            yield (
                "per_layer_inputs",
                kernels.per_layer_inputs(parts(self._context), self._tokens_TO[rows].contiguous(), norm, 0.125),
            )
        weights_TK, experts_TK = kernels.route(parts(self._logits, wide), self._router_scale, self._widths.top_k)
        yield from _numbered("route", [weights_TK, experts_TK])

    def _attention_inputs(
        self, kernels: Kernels, qkv_STO: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        widths, num_rows = self._widths, qkv_STO.shape[1]
        pages = self._table.new_zeros(2, -(-num_rows // 16) + 1, 16, widths.kv_heads, widths.head_dim)
        slots_T = torch.randperm(pages.shape[1] * 16, device=self._device)[:num_rows]
        norm = Norm(self._head_weight, EPS)
        write = KVWrite(norm, True, pages[0], pages[1], slots_T)
        yield "attention_inputs", kernels.attention_inputs(qkv_STO, cos_T1D, sin_T1D, widths.heads, norm, write)
        yield "keys", pages[0].flatten(0, 1)[slots_T]
        yield "values", pages[1].flatten(0, 1)[slots_T]


def dependent(kernels: Kernels, inputs: RowsAlone, groups: Sequence[slice]) -> list[str]:
    """Kernels whose rows differ where they come in these groups, or in other numbers of parts, from all in one part."""
    found = []
    whole = inputs.outputs(kernels, slice(None), 1)
    for rows in groups:
        for num_parts, rounded in ((1, False), (1, True), (2, False), (4, False), (8, False)):
            for name, value in inputs.outputs(kernels, rows, num_parts, rounded=rounded).items():
                if not torch.equal(value, whole[name][rows]):
                    found.append(f"{name}, rows {rows.start} to {rows.stop}, {num_parts} parts")
    return found


def _numbered(name: str, values: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for number, value in enumerate(values):
        yield f"{name} {number}", value
