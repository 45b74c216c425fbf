"""The tests' own compiler of kernels: it specializes a launch's numbers as Triton does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

import triton
import triton.language as tl

from support.kernels.triton_compile import compile_launches


@triton.jit(do_not_specialize=["count"])
def _write_unspecialized(at, count):  # type: ignore[no-untyped-def]
    tl.store(at, count)


@triton.jit
def _write_specialized(at, count):  # type: ignore[no-untyped-def]
    tl.store(at, count)


def test_a_number_that_is_not_specialized_stays_an_argument() -> None:
    at = torch.empty(1, dtype=torch.int32)
    programs = [compile_launches(partial(_write_unspecialized[(1,)], at, n))[0].ttir for n in (1, 3, 16)]
    assert len(set(programs)) == 1


def test_others_are_specialized_for_one_and_for_multiples_of_16() -> None:
    at = torch.empty(1, dtype=torch.int32)
    programs = [compile_launches(partial(_write_specialized[(1,)], at, n))[0].ttir for n in (1, 3, 16)]
    assert len(set(programs)) == 3
