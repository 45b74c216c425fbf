"""Run by `test_triton_token_choice` in a process of its own: prints how each case differs from the reference."""

from __future__ import annotations

import torch

from gemray_kernels.triton.token_choice import TritonKernels
from support.kernels.choice_parity import CASES
from support.kernels.quick_interpreter import patch_language_once


def main() -> None:
    """Every case on the CPU, one line each."""
    for name, case in CASES.items():
        print(name, "; ".join(case.mismatches(TritonKernels(), torch.device("cpu"))), sep="\t", flush=True)


if __name__ == "__main__":
    patch_language_once()
    main()
