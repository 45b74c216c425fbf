"""The tests' own compiler of kernels: it specializes a launch's numbers as Triton does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

import triton
import triton.language as tl

from support.kernels import triton_compile
from support.kernels.triton_compile import Compiled, compile_launches


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


def test_a_program_is_disassembled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and by others that share Triton's cache; nothing is kept where there is no disassembler."""
    asked: list[bytes] = []
    told: str | None = None

    def tell(name: str, options: object, cubin: bytes) -> str | None:
        asked.append(cubin)
        return told

    def program(cubin: bytes, ptx: str = "wgmma") -> Compiled:
        return Compiled("kernel", 0, None, None, ptx, "", "", cubin)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_compile, "_told_by", tell)
    assert program(b"one").lost_products is None
    told = " HGMMA.64x8x16 RZ, R1;"
    assert [program(b"one").lost_products for _ in range(2)] == [1, 1]
    told = ""
    assert program(b"two").lost_products == 0
    assert program(b"three", ptx="add").lost_products == 0
    assert asked == [b"one", b"one", b"two"]
