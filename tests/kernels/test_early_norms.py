"""What norms of the stream load before they wait for the kernel before them, as compiled for Hopper: all weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton import layer_norms
from support.kernels.triton_compile import compile_launches

WAIT = "griddepcontrol.wait"
LET = "griddepcontrol.launch_dependents"
LOADS = "ld.global"
SUM = "bar.sync"
"""The first of them is where the warps' parts of a row's sum meet."""


def norm(width: int) -> Norm:
    return Norm(numbers(width), 1e-6)


def numbers(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def update(width: int, num_norms: int, *, lets_at_once: bool = False) -> Callable[[], object]:
    stream_TD, parts_STD = numbers(1, width), torch.empty(4, 1, width)
    norms = [norm(width) for _ in range(num_norms)]
    return lambda: layer_norms.add_then_norms(
        stream_TD, parts_STD, norm(width), numbers(1), norms, lets_at_once=lets_at_once
    )


def update_by_experts(width: int, *, lets_at_once: bool = False) -> Callable[[], object]:
    stream_TD, parts_STD, routed_TKD = numbers(1, width), torch.empty(3, 1, width), numbers(1, 8, width)
    dense, experts, post = (norm(width) for _ in range(3))
    return lambda: layer_norms.add_experts_then_norms(
        stream_TD,
        parts_STD,
        dense,
        routed_TKD,
        torch.empty(1, 8),
        experts,
        post,
        numbers(1),
        [norm(width)],
        lets_at_once=lets_at_once,
    )


@pytest.mark.parametrize(
    ("call", "weights"),
    [
        pytest.param(update(1536, 0), 2, id="E2B, none"),
        pytest.param(update(1536, 1), 3, id="E2B"),
        pytest.param(update(2560, 1), 3, id="E4B"),
        pytest.param(update(2816, 3), 5, id="26B-A4B, three"),
        pytest.param(update_by_experts(2816), 5, id="26B-A4B, experts"),
    ],
)
def test_norms_of_narrow_rows_have_loaded_every_weight_before_they_wait(
    call: Callable[[], object], weights: int
) -> None:
    with mock.patch.object(layer_norms, "starts_early", return_value=True):
        (kernel,) = compile_launches(call)
    before, after = kernel.ptx.split(WAIT)
    assert before.count(LOADS) >= weights
    assert LET in after
    assert LOADS in after
    assert after.rindex(LOADS) < after.index(SUM), "a load behind a sum begins when the sum has ended"


def test_norms_of_wide_rows_have_loaded_their_weights_before_they_wait() -> None:
    with mock.patch.object(layer_norms, "starts_early", return_value=True):
        (kernel,) = compile_launches(update(5376, 1))
    before, after = kernel.ptx.split(WAIT)
    assert before.count(LOADS) >= 2
    assert after[after.index(SUM) :].count(LOADS) == 1, "the scale's"


@pytest.mark.parametrize("lets_at_once", [False, True])
@pytest.mark.parametrize("make", [partial(update, 2560, 1), partial(update_by_experts, 2816)])
def test_a_reader_starts_at_once_where_it_may(make: Callable[..., Callable[[], object]], lets_at_once: bool) -> None:
    with mock.patch.object(layer_norms, "starts_early", return_value=True):
        (kernel,) = compile_launches(make(lets_at_once=lets_at_once))
    assert (kernel.ptx.index(LET) < kernel.ptx.index(WAIT)) == lets_at_once
