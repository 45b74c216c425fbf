"""Layouts that the Triton kernels don't read are refused with the tensor's name, shape and strides."""

from __future__ import annotations

import pytest
import torch

from gemray_kernels.layout import require_contiguous, require_rows


def test_rows_may_lie_apart_but_not_their_elements() -> None:
    table = torch.zeros(4, 6)
    require_rows(x=table, some=table[::2], part=table[:, 2:5], one=table.t()[:, :1])
    with pytest.raises(ValueError, match=r"last axis of x must be contiguous; shape \[6, 4\] with strides \[1, 6\]"):
        require_rows(x=table.t())


def test_whole_tensors_have_no_gaps() -> None:
    table = torch.zeros(4, 6)
    require_contiguous(table=table, rows=table[1:3])
    with pytest.raises(ValueError, match=r"weight must be contiguous; shape \[4\] with strides \[6\]"):
        require_contiguous(table=table, weight=table[:, 0])
