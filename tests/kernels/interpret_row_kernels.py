"""Run by `test_triton_row_kernels` in a process of its own: prints what differs from the references."""

from __future__ import annotations

from gemray_kernels.table import triton_row_kernels
from support.kernels.quick_interpreter import patch_language_once
from support.kernels.row_parity import layouts_accepted, row_differences


def main() -> None:
    """One line a difference; then how many cases there were."""
    seeds = range(8)
    for seed, name in row_differences(triton_row_kernels(), "cpu", seeds):
        print(f"case {seed}: {name}")
    for name in layouts_accepted(triton_row_kernels(), "cpu"):
        print(f"accepted: {name}")
    print(f"{len(seeds)} cases")


if __name__ == "__main__":
    patch_language_once()
    main()
