"""Each accelerated kernel against its reference in float64, on fresh random inputs, its outputs poisoned first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import FP8, to_fp8
from gemray_kernels.reference import paged_attention
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.slot_tables import Columns
from gemray_kernels.table import REFERENCE, Kernels
from gemray_workers.model.attention import AttentionKernel

K_SCALE, V_SCALE = 0.03125, 0.0123
"""Scales of pages of 8-bit floats: a power of two, and one by which a product is rounded."""


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
            found = kernel(
                *batch,
                window=self.window,
                causal=self.causal,
                scale=self.scale,
                most_keys=max(keys for _, keys in self.lengths),
            )
        wide = [x.double() if x.is_floating_point() else x for x in batch]
        expected = paged_attention.paged_attention(*wide, window=self.window, causal=self.causal, scale=self.scale)
        return relative_error(found, expected)

    def fp8_error(self, kernel: AttentionKernel, dtype: torch.dtype, device: str, seed: int) -> float:
        """As `error`, over pages of 8-bit floats with scales."""
        q_TND, k_pages, v_pages, *tables = self.batch(dtype, device, seed)
        pages = [to_fp8(k_pages, K_SCALE), to_fp8(v_pages, V_SCALE)]
        with poisoned_memory():
            found = kernel(
                q_TND,
                *pages,
                *tables,
                window=self.window,
                causal=self.causal,
                scale=self.scale,
                k_scale=K_SCALE,
                v_scale=V_SCALE,
            )
        # What the pages say, written out.
        wide = [pages[0].double() * K_SCALE, pages[1].double() * V_SCALE]
        expected = paged_attention.paged_attention(
            q_TND.double(), *wide, *tables, window=self.window, causal=self.causal, scale=self.scale
        )
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


def beside_others(attend: Callable[..., Tensor], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of five sequences as `attend` has it among them, and again in another place, beside one that holds other
    keys and one that holds none."""
    case = AttentionCase([(5, 3000), (5, 90), (5, 1024), (5, 17), (5, 2500)], 32, 16, 256, 16, 1024)
    q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S = case.batch(torch.bfloat16, device, seed=5)

    def attended(q_TND: Tensor, table_SP: Tensor, kv_len_S: Tensor) -> Tensor:
        batch = (q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S)
        return attend(*batch, window=case.window, causal=case.causal, scale=case.scale).view(5, 5, 32, 256)

    together = attended(q_TND, table_SP, kv_len_S)
    for s in range(5):
        order = [(s + shift) % 5 for shift in (2, 0, 1, 3, 4)]
        other_lens = kv_len_S[order]
        other_lens[[0, 3]] = torch.tensor([700, 0], dtype=torch.int32, device=device)
        q = q_TND.view(5, 5, 32, 256)[order].flatten(0, 1).contiguous()
        yield together[s], attended(q, table_SP[order], other_lens)[1]


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

    x, weight, square = random(rows, width), random(width), random(width, width, gain=width**-0.5)
    heads_TND = random(rows, heads, head_dim)
    head_weight = random(head_dim)
    logits = (torch.randn(rows, experts, generator=generator) * 2).to(device)
    chosen_weights, chosen = REFERENCE.route(logits.unsqueeze(0), random(experts), top_k)
    expert_width = 2 * head_dim + 8
    gate_up = random(experts, 2 * expert_width, width, gain=width**-0.5)
    down = random(experts, width, expert_width, gain=expert_width**-0.5)

    def routed(kernels: Kernels, dtype: torch.dtype) -> Tensor:
        weights, numbers = kernels.route(logits.unsqueeze(0), scale_E, top_k)
        return torch.cat([weights.double(), numbers.double()], dim=1)

    scale_E = random(experts)
    return {
        "rms_norm": lambda k, t: k.rms_norm(x.to(t), weight.to(t), 1e-6),
        "rms_norm of heads": lambda k, t: k.rms_norm(heads_TND.to(t), None, 1e-6),
        "rms_norm_then_scale": lambda k, t: k.rms_norm_then_scale(heads_TND.to(t), head_weight.to(t), 1e-6),
        "gelu_linear": lambda k, t: k.gelu_linear(x.to(t), square.to(t)),
        "silu_linear": lambda k, t: k.silu_linear(x.to(t), square.to(t)),
        "route": routed,
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
    expected_weights, expected = REFERENCE.route(logits.unsqueeze(0), scale, top_k)
    weights, found = kernels.route(logits.unsqueeze(0), scale, top_k)
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

    angles, head_weight = whole(3, 1, 8), whole(8)
    norm, spaced_norm = Norm(head_weight, 1e-6), Norm(spaced(8), 1e-6)
    columns = Columns(ids(4), 0, 4, 4, 4, 0)
    k = kernels
    calls: dict[str, Callable[[], object]] = {
        "rms_norm x": lambda: k.rms_norm(flipped(3, 8), head_weight, 1e-6),
        "rms_norm x of heads": lambda: k.rms_norm(flipped(3, 2, 8), None, 1e-6),
        "rms_norm weight": lambda: k.rms_norm(whole(3, 8), spaced(8), 1e-6),
        "rms_norm_then_scale x": lambda: k.rms_norm_then_scale(flipped(3, 8), head_weight, 1e-6),
        "add_then_norms residual": lambda: k.add_then_norms(flipped(3, 8), whole(1, 3, 8), norm, None, []),
        "add_then_norms summands": lambda: k.add_then_norms(whole(3, 8), flipped(1, 3, 8), norm, None, []),
        "add_then_norms weight": lambda: k.add_then_norms(whole(3, 8), whole(1, 3, 8), spaced_norm, None, []),
        "add_then_norms next": lambda: k.add_then_norms(whole(3, 8), whole(1, 3, 8), norm, None, [spaced_norm]),
        "add_experts_then_norms routed": lambda: k.add_experts_then_norms(
            whole(3, 8), whole(1, 3, 8), norm, flipped(3, 2, 8), whole(3, 2), norm, norm, None, []
        ),
        "add_experts_then_norms weights": lambda: k.add_experts_then_norms(
            whole(3, 8), whole(1, 3, 8), norm, whole(3, 2, 8), flipped(3, 2), norm, norm, None, []
        ),
        "attention_inputs summands": lambda: k.attention_inputs(flipped(1, 3, 8), angles, angles, 1, norm, None),
        "attention_inputs cos": lambda: k.attention_inputs(
            whole(1, 3, 8), whole(8, 1, 3).permute(2, 1, 0), angles, 1, norm, None
        ),
        "attention_inputs sin": lambda: k.attention_inputs(
            whole(1, 3, 8), angles, whole(8, 1, 3).permute(2, 1, 0), 1, norm, None
        ),
        "attention_inputs weight": lambda: k.attention_inputs(whole(1, 3, 8), angles, angles, 1, spaced_norm, None),
        "attention_inputs pages": lambda: k.attention_inputs(
            whole(1, 3, 16),
            angles,
            angles,
            0,
            None,
            KVWrite(norm, True, flipped(2, 4, 2, 8), flipped(2, 4, 2, 8), ids(3)),
        ),
        "attention_inputs places": lambda: k.attention_inputs(
            whole(1, 3, 16),
            angles,
            angles,
            0,
            None,
            KVWrite(norm, True, whole(2, 4, 2, 8), whole(2, 4, 2, 8), ids(3, 2)[:, 0]),
        ),
        "embed ids": lambda: k.embed(ids(3, 2)[:, 0], whole(4, 8), columns, 1.0, None),
        "embed table": lambda: k.embed(ids(3), flipped(4, 8), columns, 1.0, None),
        "per_layer_inputs context": lambda: k.per_layer_inputs(flipped(1, 3, 16), whole(3, 16), norm, 1.0),
        "per_layer_inputs tokens": lambda: k.per_layer_inputs(whole(1, 3, 16), flipped(3, 16), norm, 1.0),
        "rope_tables positions": lambda: k.rope_tables(ids(3, 2)[:, 0], [head_weight], torch.float32),
        "rope_tables frequencies": lambda: k.rope_tables(ids(3), [spaced(8)], torch.float32),
        "gated_projection summands": lambda: k.gated_projection(flipped(1, 3, 8), whole(3, 8), whole(4, 8)),
        "gated_projection factor": lambda: k.gated_projection(whole(1, 3, 8), flipped(3, 8), whole(4, 8)),
        "gated_projection weight": lambda: k.gated_projection(whole(1, 3, 8), whole(3, 8), flipped(4, 8)),
        "route summands": lambda: k.route(flipped(1, 3, 4), whole(4), 2),
        "route scale": lambda: k.route(whole(1, 3, 4), spaced(4), 2),
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


def fp8_bytes_that_differ(kernels: Kernels, device: str, *, interpreted: bool = False) -> dict[str, int]:
    """By dtype and layout of projections: bytes of 8-bit pages that are others than the reference's.

    Args:
        kernels: whose pages are compared.
        device: where they run.
        interpreted: leave out what Triton's interpreter rounds wrongly: subnormal numbers, which it cuts, and those
            that rounding makes a power of two, whose carry it loses.
    """
    generator = torch.Generator().manual_seed(11)
    rows, heads, kv_heads, head_dim = 40, 2, 2, 64
    angle = (torch.rand(rows, 1, head_dim, generator=generator) * 6).to(device)
    # Beside usual numbers some beyond both ends of the format.
    summands_STO = torch.randn(1, rows, (heads + 2 * kv_heads) * head_dim, generator=generator)
    summands_STO[:, ::5, ::7] *= 1e5
    summands_STO[:, ::3, ::11] *= 1e-3
    weight_D = torch.randn(head_dim, generator=generator).to(device)
    places_T = torch.randperm(rows, generator=generator).to(device) + 16
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kind, stop in (("with values", heads + 2 * kv_heads), ("values of keys", heads + kv_heads)):
            kept = []
            for used in (kernels, REFERENCE):
                pages = torch.zeros(2, 5, 16, kv_heads, head_dim, device=device).to(FP8)
                norm = Norm(weight_D.to(dtype), 1e-6)
                write = KVWrite(norm, kind != "with values", pages[0], pages[1], places_T, K_SCALE, V_SCALE)
                parts = summands_STO[..., : stop * head_dim].to(device, dtype)
                used.attention_inputs(parts, angle.cos().to(dtype), angle.sin().to(dtype), heads, norm, write)
                kept.append(pages.view(torch.uint8))
            compared = (kept[1] & 0x78 != 0) & (kept[1] & 0x07 != 0) if interpreted else torch.tensor(True)
            found[f"{dtype} {kind}"] = int((compared.to(device) & (kept[0] != kept[1])).sum())
            assert (kept[1] & 0x7F).eq(0x7E).any() or kind != "with values", "no number beyond the largest"
    return found


def kernel_errors(kernels: Kernels, runs: dict[str, Run], dtype: torch.dtype) -> dict[str, float]:
    """By name, each kernel's relative error in `dtype` against the reference in float64."""
    errors = {}
    for name, run in runs.items():
        with poisoned_memory():
            found = run(kernels, dtype)
        errors[name] = relative_error(found, run(REFERENCE, torch.float64))
    return errors
