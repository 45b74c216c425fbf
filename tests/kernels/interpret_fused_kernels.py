"""Run by `test_triton_fused_kernels` in a process of its own: prints the name and relative error of every kernel."""

from __future__ import annotations

import torch

from gemray_kernels.table import triton_kernels
from support.kernels.fused_parity import fused_runs
from support.kernels.kernel_parity import kernel_errors
from support.kernels.quick_interpreter import patch_language_once


def main() -> None:
    """Interpreted bfloat16 is truncated, not rounded, so only float32 says something about digits."""
    runs = fused_runs("cpu", 7, rows=5, width=96, heads=4, kv_heads=2, head_dim=32, experts=12, top_k=3)
    for name, error in kernel_errors(triton_kernels(), runs, torch.float32).items():
        print(name, error, sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
