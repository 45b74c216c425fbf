"""Run by `test_attention_inputs.py` in Triton's interpreter: numbers that differ by rows of a call, and the error."""

from __future__ import annotations

import torch

from gemray_kernels.table import triton_kernels
from support.kernels.attention_input_rows import numbers_of_rows


def main() -> None:
    """Heads that no program's number of heads divides."""
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN: a query that is not written shows
    for has_v in (True, False):
        many, few, expected = numbers_of_rows(
            triton_kernels(), "cpu", torch.float32, rows=70, shape="odd", has_v=has_v, few=33
        )
        for name, one, other, wanted in zip(("q", "k", "v"), many, few, expected, strict=True):
            wrong = float((one.double() - wanted).norm() / wanted.norm())
            print(f"{name}, {has_v}", int((one != other).sum()), wrong, sep="\t")


if __name__ == "__main__":
    main()
