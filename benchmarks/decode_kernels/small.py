"""Norms and attention's inputs: what lies between 31B's products."""

from __future__ import annotations

from functools import partial

import torch

from decode_kernels.measure import DEVICE, Report, early, error, in_words, median_us, random
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.table import REFERENCE, triton_kernels
from support.kernels.fused_parity import fused_runs
from support.kernels.kernel_parity import kernel_errors

HEADS, KV_HEADS, DIM, HIDDEN = 32, 16, 256, 5376


def small(report: Report) -> None:
    """Check every fused kernel at some numbers of rows, then time norms and attention's inputs."""
    for rows in (1, 7, 16, 40):
        check(report, rows)
    norm, head_norm = Norm(random(HIDDEN), 1e-6), Norm(random(DIM), 1e-6)
    for rows in (1, 8, 40):
        for summands in (1, 3):
            measure(report, rows, summands, norm, head_norm)


def check(report: Report, rows: int) -> None:
    """Compare fused kernels with their references, started early and not."""
    runs = fused_runs("cuda", rows, rows=rows, width=2816, heads=16, kv_heads=8, head_dim=256, experts=128, top_k=8)
    for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float32, 3e-6)):
        for on in (False, True):
            with early(on):
                for name, wrong in kernel_errors(triton_kernels(), runs, dtype).items():
                    if not wrong < limit:
                        report.fault(f"{name} of {rows} rows, {dtype}, early {on}: error {wrong}")


def measure(report: Report, rows: int, summands: int, norm: Norm, head_norm: Norm) -> None:
    """Time both kernels over products of `summands` summands."""
    kernels = triton_kernels()
    pages = [random(64, 16, KV_HEADS, DIM) for _ in range(2)]
    write = KVWrite(head_norm, True, pages[0], pages[1], torch.randperm(64 * 16, device=DEVICE)[:rows])
    angle = torch.rand(rows, 1, DIM, device=DEVICE) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    dtype = torch.bfloat16 if summands == 1 else torch.float32
    parts = [random(summands, rows, HIDDEN, dtype=dtype) for _ in range(6)]
    qkv = [random(summands, rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype) for _ in range(6)]
    x = random(rows, HIDDEN)
    found: dict[str, float] = {}
    for label, on in (("fused", False), ("early", True)):
        with early(on):
            norms = [partial(kernels.add_then_norms, x, p, norm, None, [norm]) for p in parts]
            found[f"norms {label}"] = median_us(norms)
            inputs = [partial(kernels.attention_inputs, p, cos, sin, HEADS, head_norm, write) for p in qkv]
            found[f"inputs {label}"] = median_us(inputs)
    got = kernels.add_then_norms(x, parts[0], norm, None, [norm])
    wide = Norm(norm.weight_D.double(), 1e-6)
    expected = REFERENCE.add_then_norms(x.double(), parts[0].double(), wide, None, [wide])
    for a, b in zip(got, expected, strict=True):
        if not (wrong := error(a, b)) < 1e-2:
            report.fault(f"norms of {rows} rows: error {wrong}")
    report.row("small", f"small, {rows} rows, {summands} summands: {in_words(found)}", rows=rows, found=found)
