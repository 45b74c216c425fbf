"""Each fused kernel against its reference in float64, on fresh random inputs, its outputs poisoned first."""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.reference.rope import inverse_frequencies
from gemray_kernels.slot_tables import Columns
from gemray_kernels.table import REFERENCE, Kernels
from support.kernels.kernel_parity import Run

EPS = 1e-6


def fused_runs(
    device: str, seed: int, *, rows: int, width: int, heads: int, kv_heads: int, head_dim: int, experts: int, top_k: int
) -> dict[str, Run]:
    """By name: a function that runs one kernel on fixed random inputs, the same bfloat16 numbers in every dtype."""
    from gemray_kernels.triton.linear import Gate, LinearTile, gated_linear_in_tiles, linear_in_tiles

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * gain).bfloat16().to(device)

    residual, scale = random(rows, width), random(1)
    weights = [random(width) for _ in range(4)]
    summands = {count: random(count, rows, width) for count in (1, 3)}
    routed, mixing = random(rows, top_k, width), random(rows, top_k).abs()
    head_weight = random(head_dim)
    angle = torch.rand(rows, 1, head_dim, generator=generator).to(device) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    slots = (torch.randperm(8 * rows, generator=generator)[:rows] + 16).to(device)
    logits = (torch.randn(2, rows, experts, generator=generator) * 2).to(device)
    chosen = REFERENCE.route(logits, random(experts), top_k)[1]
    expert_width = 2 * head_dim + 8
    gate_up = random(experts, 2 * expert_width, width, gain=width**-0.5)
    down = random(experts, width, expert_width, gain=expert_width**-0.5)
    square, tall = random(width, width, gain=width**-0.5), random(2 * width, width, gain=width**-0.5)

    def norms(dtype: torch.dtype) -> list[Norm]:
        first, second, third, _ = (weight.to(dtype) for weight in weights)
        return [Norm(first, EPS), Norm(second, EPS, round_before_weight=True, factor=0.25), Norm(third, EPS)]

    def added(kernels: Kernels, dtype: torch.dtype, count: int, num_norms: int, *, post: bool, scaled: bool) -> Tensor:
        post_norm = Norm(weights[3].to(dtype), EPS) if post else None
        return torch.stack(
            kernels.add_then_norms(
                residual.to(dtype),
                summands[count].to(dtype),
                post_norm,
                scale.to(dtype) if scaled else None,
                norms(dtype)[:num_norms],
            )
        )

    def with_experts(kernels: Kernels, dtype: torch.dtype) -> Tensor:
        dense, experts_norm, post = (Norm(weight.to(dtype), EPS) for weight in weights[:3])
        return torch.stack(
            kernels.add_experts_then_norms(
                residual.to(dtype),
                summands[3].to(dtype),
                dense,
                routed.to(dtype),
                mixing.to(torch.promote_types(torch.float32, dtype)),
                experts_norm,
                post,
                scale.to(dtype),
                norms(dtype)[:1],
            )
        )

    def inputs(kernels: Kernels, dtype: torch.dtype, count: int, kinds: str, *, qwen: bool = False) -> Tensor:
        num_heads = heads if "q" in kinds else 0
        stacked = num_heads + kv_heads * (kinds.count("k") + kinds.count("v"))
        parts = qkv[:count, :, : stacked * head_dim].to(dtype)
        pages = torch.zeros(2, rows + 2, 16, kv_heads, head_dim, dtype=dtype, device=device)
        norm = Norm(head_weight.to(dtype), EPS, round_before_weight=qwen)
        write = KVWrite(norm, not qwen, pages[0], pages[1], slots) if "k" in kinds else None
        q = kernels.attention_inputs(parts, cos.to(dtype), sin.to(dtype), num_heads, norm if num_heads else None, write)
        return torch.cat([q.flatten(), pages.flatten()])

    qkv = random(3, rows, (heads + 2 * kv_heads) * head_dim)

    def route(kernels: Kernels, dtype: torch.dtype) -> Tensor:
        weights_TK, numbers_TK = kernels.route(logits, router_scale, top_k)
        return torch.cat([weights_TK.double(), numbers_TK.double()], dim=1)

    router_scale = random(experts)
    held = Columns(torch.zeros(0, dtype=torch.int64), 20, 2 * width, 2 * width + 16, 7000, 24)
    ids = torch.tensor([20, 20 + 2 * width, 19, 6999, 7000, 7023, 7024, -1], device=device).repeat(rows)[: rows + 3]
    table = random(2 * width + 40, width)
    context, per_layer = random(3, rows, 3 * head_dim), random(rows, 3 * head_dim)
    positions = torch.randint(0, 262144, (rows,), generator=generator).to(device)
    steps = [inverse_frequencies(d, 1e6, partial_rotary_factor=f, device=device) for d, f in ((32, 1), (64, 0.25))]

    def embedded(kernels: Kernels, dtype: torch.dtype, known: int | None) -> Tensor:
        return kernels.embed(ids, table.to(dtype), held, 7.3125, known)

    def per_layer_inputs(kernels: Kernels, dtype: torch.dtype) -> Tensor:
        norm = Norm(head_weight.to(dtype), EPS)
        return kernels.per_layer_inputs(context.to(dtype), per_layer.to(dtype), norm, 0.125)

    def angles_of(kernels: Kernels, dtype: torch.dtype) -> Tensor:
        tables = kernels.rope_tables(positions, steps, dtype)
        return torch.cat([table.flatten() for pair in tables for table in pair])

    def streamed(tile: LinearTile) -> Run:
        def run(kernels: Kernels, dtype: torch.dtype) -> Tensor:
            if kernels is REFERENCE:
                return REFERENCE.linear(residual.to(dtype), square.to(dtype))
            return linear_in_tiles(residual.to(dtype), square.to(dtype), tile, out_dtype=torch.float32).sum(0)

        return run

    def gated(tile: LinearTile, gate: Gate) -> Run:
        def run(kernels: Kernels, dtype: torch.dtype) -> Tensor:
            if kernels is REFERENCE:
                linear = REFERENCE.gelu_linear if gate is Gate.GELU else REFERENCE.silu_linear
                return linear(residual.to(dtype), tall.to(dtype))
            return gated_linear_in_tiles(residual.to(dtype), tall.to(dtype), tile, gate)

        return run

    def projected(kernels: Kernels, dtype: torch.dtype, num_in: int) -> Tensor:
        weight = tall[:, :num_in].to(dtype).contiguous()
        return kernels.gated_projection(
            summands[3].to(dtype)[:, :, :num_in], residual.to(dtype)[:, :num_in], weight
        ).sum(0)

    return {
        "add_then_norms": lambda k, t: added(k, t, 1, 1, post=True, scaled=False),
        "add_then_norms, parts, scaled, three": lambda k, t: added(k, t, 3, 3, post=True, scaled=True),
        "add_then_norms, no post norm": lambda k, t: added(k, t, 3, 2, post=False, scaled=False),
        "add_then_norms, no norms": lambda k, t: added(k, t, 1, 0, post=True, scaled=True),
        "add_experts_then_norms": with_experts,
        "attention_inputs": lambda k, t: inputs(k, t, 1, "qkv"),
        "attention_inputs, parts, V = K": lambda k, t: inputs(k, t, 3, "qk"),
        "attention_inputs, queries alone": lambda k, t: inputs(k, t, 2, "q"),
        "attention_inputs, keys and values alone": lambda k, t: inputs(k, t, 1, "kv", qwen=True),
        "attention_inputs, Qwen's": lambda k, t: inputs(k, t, 2, "qkv", qwen=True),
        "embed": lambda k, t: embedded(k, t, None),
        "embed, few ids known": lambda k, t: embedded(k, t, 7010),
        "per_layer_inputs": per_layer_inputs,
        "rope_tables": angles_of,
        "route": route,
        "expert_outputs": lambda k, t: k.expert_outputs(residual.to(t), chosen, gate_up.to(t), down.to(t)),
        "gated_projection": lambda k, t: projected(k, t, min(width, 200)),
        "gated_projection, many inputs": lambda k, t: projected(k, t, width),
        "weight first": streamed(LinearTile(64, 32, 4, 3, splits=2)),
        "rows first": streamed(LinearTile(32, 32, 4, 3, splits=3, weight_first=False)),
        "gated, weight first": gated(LinearTile(64, 32, 4, 3), Gate.GELU),
        "gated, rows first": gated(LinearTile(32, 32, 4, 3, weight_first=False), Gate.SILU),
    }
