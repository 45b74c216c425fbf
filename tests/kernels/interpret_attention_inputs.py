"""Run by `test_attention_inputs.py` in Triton's interpreter: numbers that differ by rows of a call, and the error."""

from __future__ import annotations

from unittest import mock

import torch

from gemray_kernels.table import triton_kernels
from gemray_kernels.triton import attention_inputs
from support.kernels.attention_input_rows import numbers_of_rows
from support.kernels.quick_interpreter import patch_language_once


def main() -> None:
    """Heads that no program's number of heads divides. Seven rows are many here: a row's programs are its own."""
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN: a query that is not written shows
    for has_v in (True, False):
        with mock.patch.object(attention_inputs, "FEW_ROWS", 4):
            many, few, expected = numbers_of_rows(
                triton_kernels(), "cpu", torch.float32, rows=7, shape="odd", has_v=has_v, few=3
            )
        for name, one, other, wanted in zip(("q", "k", "v"), many, few, expected, strict=True):
            wrong = float((one.double() - wanted).norm() / wanted.norm())
            print(f"{name}, {has_v}", int((one != other).sum()), wrong, sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
