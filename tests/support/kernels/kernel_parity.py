"""Each accelerated kernel against its reference in float64, on fresh random inputs, its outputs poisoned first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.reference import paged_attention
from gemray_kernels.table import REFERENCE, Kernels
from gemray_workers.model.attention import AttentionKernel


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN (or the largest integer) until somebody writes them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖; NaN where either has one."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class AttentionCase:
    """Shapes of a batch; `lengths` are (rows, keys) of each sequence."""

    lengths: Sequence[tuple[int, int]]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    window: int | None = None
    causal: bool = True
    scale: float = 1.0

    def error(self, kernel: AttentionKernel, dtype: torch.dtype, device: str, seed: int) -> float:
        """Greatest error of `kernel`, where pages that no row sees, and entries behind the last key, hold NaN."""
        batch = self.batch(dtype, device, seed)
        with poisoned_memory():
            found = kernel(*batch, window=self.window, causal=self.causal, scale=self.scale)
        wide = [x.double() if x.is_floating_point() else x for x in batch]
        expected = paged_attention.paged_attention(*wide, window=self.window, causal=self.causal, scale=self.scale)
        return relative_error(found, expected)

    def batch(self, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
        """Arguments of the kernel, in order."""
        generator = torch.Generator().manual_seed(seed)
        pages_each = max(-(-keys // self.page_size) for _, keys in self.lengths) + 1
        num_pages = 1 + pages_each * len(self.lengths)
        order = torch.randperm(num_pages - 1, generator=generator) + 1
        table_SP = order.view(len(self.lengths), pages_each).to(torch.int32)
        k_pages, v_pages = (
            torch.full((num_pages, self.page_size, self.kv_heads, self.head_dim), torch.nan, dtype=dtype)
            for _ in range(2)
        )
        for (rows, keys), table_P in zip(self.lengths, table_SP, strict=True):
            first = 0 if self.window is None else max(0, keys - rows - self.window + 1)
            at = torch.arange(first, keys)
            slots = table_P.long()[at // self.page_size] * self.page_size + at % self.page_size
            for pages in (k_pages, v_pages):
                pages.view(-1, self.kv_heads, self.head_dim)[slots] = torch.randn(
                    keys - first, self.kv_heads, self.head_dim, generator=generator
                ).to(dtype)
            table_P[: first // self.page_size] = 0  # given back: the null page stands there
        num_rows = [rows for rows, _ in self.lengths]
        # Scores of a spread that makes the softmax neither flat nor a single key.
        q_TND = torch.randn(sum(num_rows), self.heads, self.head_dim, generator=generator) * 1.5 / self.head_dim**0.5
        batch = [
            q_TND.to(dtype),
            k_pages,
            v_pages,
            table_SP,
            torch.tensor([0, *num_rows]).cumsum(0).to(torch.int32),
            torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32),
        ]
        return [tensor.to(device) for tensor in batch]


Run = Callable[[Kernels, torch.dtype], Tensor]


def kernel_runs(
    device: str, seed: int, *, rows: int, width: int, heads: int, kv_heads: int, head_dim: int, experts: int, top_k: int
) -> dict[str, Run]:
    """By name: a function that runs one kernel on fixed random inputs, rounded to the dtype's low precision first.

    The inputs of every call are the same bfloat16 numbers, so that float64 is a reference for the others.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * gain).bfloat16().to(device)

    x, residual, weight, scale = random(rows, width), random(rows, width), random(width), random(1)
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim)
    head_weight = random(head_dim)
    angle = torch.rand(rows, 1, head_dim, generator=generator).to(device) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    slots = (torch.randperm(8 * rows, generator=generator)[:rows] + 16).to(device)
    logits = (torch.randn(rows, experts, generator=generator) * 2).to(device)
    chosen_weights, chosen = REFERENCE.choose_experts(logits, random(experts), top_k)
    expert_width = 2 * head_dim + 8
    gate_up = random(experts, 2 * expert_width, width, gain=width**-0.5)
    down = random(experts, width, expert_width, gain=expert_width**-0.5)

    def heads_of(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        parts = qkv.to(dtype).split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
        q, k, v = (part.view(rows, -1, head_dim) for part in parts)
        return q, k, v

    def written(kernels: Kernels, dtype: torch.dtype, *, v_is_k: bool) -> Tensor:
        _, k, v = heads_of(dtype)
        pages = torch.zeros(2, rows + 2, 16, kv_heads, head_dim, dtype=dtype, device=device)
        kernels.write_normed_kv(
            k, k if v_is_k else v, head_weight.to(dtype), cos.to(dtype), sin.to(dtype), 1e-6, pages[0], pages[1], slots
        )
        return pages

    def routed(kernels: Kernels, dtype: torch.dtype) -> Tensor:
        weights, numbers = kernels.choose_experts(logits, scale_E, top_k)
        return torch.cat([weights.double(), numbers.double()], dim=1)

    scale_E = random(experts)
    return {
        "rms_norm": lambda k, t: k.rms_norm(x.to(t), weight.to(t), 1e-6),
        "rms_norm of heads": lambda k, t: k.rms_norm(heads_of(t)[1], None, 1e-6),
        "rms_norm_then_scale": lambda k, t: k.rms_norm_then_scale(heads_of(t)[0], head_weight.to(t), 1e-6),
        "add_rms_norm": lambda k, t: k.add_rms_norm(residual.to(t), x.to(t), weight.to(t), 1e-6, None),
        "add_rms_norm, scaled": lambda k, t: k.add_rms_norm(residual.to(t), x.to(t), weight.to(t), 1e-6, scale.to(t)),
        "apply_rope": lambda k, t: k.apply_rope(heads_of(t)[0], cos.to(t), sin.to(t)),
        "norm_rope": lambda k, t: k.norm_rope(heads_of(t)[0], head_weight.to(t), cos.to(t), sin.to(t), 1e-6),
        "write_normed_kv": lambda k, t: written(k, t, v_is_k=False),
        "write_normed_kv, V = K": lambda k, t: written(k, t, v_is_k=True),
        "gelu_tanh_and_mul": lambda k, t: k.gelu_tanh_and_mul(x.to(t)),
        "silu_and_mul": lambda k, t: k.silu_and_mul(x.to(t)),
        "choose_experts": routed,
        "gated_experts": lambda k, t: k.gated_experts(x.to(t), chosen_weights, chosen, gate_up.to(t), down.to(t)),
    }


def router_differences(kernels: Kernels, device: str) -> int:
    """Rows whose experts are others than the reference's: equal logits, logits whose probabilities tie, and NaN."""
    num_experts, top_k = 24, 8
    generator = torch.Generator().manual_seed(3)
    few = torch.randint(0, 4, (64, num_experts), generator=generator).float()
    equal = torch.zeros(1, num_experts)
    # The probability of a logit far below the best is 0 whatever the logit.
    far = torch.cat([torch.full((1, 2), 200.0), torch.arange(num_experts - 2.0).view(1, -1)], dim=1)
    close = 1.0 + torch.rand(64, num_experts, generator=generator).mul(8).floor() * torch.finfo(torch.float32).eps
    logits = torch.cat([few, equal, far, close]).to(device)
    with_nan = logits[:1].clone()
    with_nan[0, 5] = torch.nan
    logits = torch.cat([logits, with_nan])
    scale = torch.ones(num_experts, device=device)
    expected_weights, expected = REFERENCE.choose_experts(logits, scale, top_k)
    weights, found = kernels.choose_experts(logits, scale, top_k)
    is_nan_alike = weights.isnan().eq(expected_weights.isnan()).all(dim=1)
    return int((~((found == expected).all(dim=1) & is_nan_alike)).sum())


def accepted_transposed(kernels: Kernels, device: str) -> list[str]:
    """Arguments that a kernel takes with another layout than it reads, instead of raising ValueError: should be none.

    The memory of a transposed tensor holds other numbers where the kernel looks.
    """

    def flipped(*shape: int) -> Tensor:
        return torch.ones(*shape[:-2], shape[-1], shape[-2], device=device).transpose(-1, -2)

    def spaced(size: int) -> Tensor:
        return torch.ones(size, 2, device=device)[:, 0]

    def whole(*shape: int) -> Tensor:
        return torch.ones(*shape, device=device)

    def ids(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    def pages() -> tuple[Tensor, Tensor]:
        return whole(2, 4, 2, 8), whole(2, 4, 2, 8)

    heads, angles, head_weight = whole(3, 2, 8), whole(3, 1, 8), whole(8)
    k = kernels
    calls: dict[str, Callable[[], object]] = {
        "rms_norm x": lambda: k.rms_norm(flipped(3, 8), head_weight, 1e-6),
        "rms_norm x of heads": lambda: k.rms_norm(flipped(3, 2, 8), None, 1e-6),
        "rms_norm weight": lambda: k.rms_norm(whole(3, 8), spaced(8), 1e-6),
        "rms_norm_then_scale x": lambda: k.rms_norm_then_scale(flipped(3, 8), head_weight, 1e-6),
        "add_rms_norm residual": lambda: k.add_rms_norm(flipped(3, 8), whole(3, 8), head_weight, 1e-6, None),
        "add_rms_norm x": lambda: k.add_rms_norm(whole(3, 8), flipped(3, 8), head_weight, 1e-6, None),
        "add_rms_norm weight": lambda: k.add_rms_norm(whole(3, 8), whole(3, 8), spaced(8), 1e-6, None),
        "apply_rope x": lambda: k.apply_rope(flipped(3, 2, 8), angles, angles),
        "apply_rope cos": lambda: k.apply_rope(heads, whole(8, 1, 3).permute(2, 1, 0), angles),
        "apply_rope sin": lambda: k.apply_rope(heads, angles, whole(8, 1, 3).permute(2, 1, 0)),
        "norm_rope x": lambda: k.norm_rope(flipped(3, 2, 8), head_weight, angles, angles, 1e-6),
        "norm_rope weight": lambda: k.norm_rope(heads, spaced(8), angles, angles, 1e-6),
        "write_normed_kv k and v": lambda: k.write_normed_kv(
            flipped(3, 2, 8), flipped(3, 2, 8), head_weight, angles, angles, 1e-6, *pages(), ids(3)
        ),
        "write_normed_kv weight": lambda: k.write_normed_kv(
            heads, heads, spaced(8), angles, angles, 1e-6, *pages(), ids(3)
        ),
        "write_normed_kv pages": lambda: k.write_normed_kv(
            heads, heads, head_weight, angles, angles, 1e-6, flipped(2, 4, 2, 8), flipped(2, 4, 2, 8), ids(3)
        ),
        "write_normed_kv slots": lambda: k.write_normed_kv(
            heads, heads, head_weight, angles, angles, 1e-6, *pages(), ids(3, 2)[:, 0]
        ),
        "gelu_tanh_and_mul": lambda: k.gelu_tanh_and_mul(flipped(3, 8)),
        "silu_and_mul": lambda: k.silu_and_mul(flipped(3, 8)),
        "choose_experts logits": lambda: k.choose_experts(flipped(3, 4), whole(4), 2),
        "choose_experts scale": lambda: k.choose_experts(whole(3, 4), spaced(4), 2),
        "gated_experts x": lambda: k.gated_experts(
            flipped(3, 8), whole(3, 2), ids(3, 2), whole(4, 8, 8), whole(4, 8, 4)
        ),
        "gated_experts weights": lambda: k.gated_experts(
            whole(3, 8), flipped(3, 2), ids(3, 2), whole(4, 8, 8), whole(4, 8, 4)
        ),
        "gated_experts gate_up": lambda: k.gated_experts(
            whole(3, 8), whole(3, 2), ids(3, 2), flipped(4, 8, 8), whole(4, 8, 4)
        ),
        "gated_experts down": lambda: k.gated_experts(
            whole(3, 8), whole(3, 2), ids(3, 2), whole(4, 8, 8), flipped(4, 8, 4)
        ),
    }
    accepted = []
    for name, call in calls.items():
        with suppress(ValueError):
            call()
            accepted.append(name)
    return accepted


def kernel_errors(kernels: Kernels, runs: dict[str, Run], dtype: torch.dtype) -> dict[str, float]:
    """By name, each kernel's relative error in `dtype` against the reference in float64."""
    errors = {}
    for name, run in runs.items():
        with poisoned_memory():
            found = run(kernels, dtype)
        errors[name] = relative_error(found, run(REFERENCE, torch.float64))
    return errors
