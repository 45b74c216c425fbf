"""Compile Triton kernels for a GPU that is not here: what a launch on CPU tensors would have compiled for sm_90."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of one block on sm_90."""

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_KEPT = "instructions.sass"


@dataclass(frozen=True)
class Compiled:
    """One kernel variant as the assembler reports it."""

    name: str
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    """Spilled registers lie there. None without cuobjdump."""
    ptx: str
    ttir: str
    """Triton's own form, after its first passes."""
    layouts: str
    """Triton's last text, which says how tiles lie in registers."""
    cubin: bytes

    @property
    def lost_products(self) -> int | None:
        """Instructions of the tensor cores whose result goes nowhere: the assembler has lost sums that the PTX asks
        for. None without nvdisasm."""
        return self._count(r"\b(?:HGMMA|HMMA)\S* RZ,") if "mma" in self.ptx else 0

    @property
    def product_waits(self) -> int | None:
        """Waits for warp groups' products: the assembler adds one behind each product where it cannot let several run.
        None without nvdisasm."""
        return self._count(r"\bWARPGROUP\.DEPBAR\b")

    @property
    def products_of_pairs(self) -> int | None:
        """Instructions that multiply two 16-bit numbers at a time and add nothing. None without nvdisasm."""
        return self._count(r"\bHMUL2")

    def _count(self, pattern: str) -> int | None:
        return None if self._sass is None else len(re.findall(pattern, self._sass))

    @cached_property
    def _sass(self) -> str | None:
        """Instructions, for who asks: nvdisasm starts for 0.4 s of CPU time, so they are kept beside Triton's programs,
        which the workers of a run and later runs share."""
        from triton import __version__
        from triton.runtime.cache import get_cache_manager

        cache = get_cache_manager(hashlib.sha256(__version__.encode() + self.cubin).hexdigest())
        kept = cache.get_file(_KEPT)
        if kept is None:
            told = _told_by("nvdisasm", ("-c", "-ndf"), self.cubin)
            if told is None:
                return None
            kept = cache.put(told, _KEPT, binary=False)
        return Path(kept).read_text()


def compile_launches(launches: Callable[[], object]) -> list[Compiled]:
    """Run `launches` with every kernel launch replaced by its compilation."""
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_compile(kernel, args, options))

    with mock.patch.object(JITFunction, "run", run):
        launches()
    return found


def launches_of(calls: Callable[[], object]) -> list[str]:
    """The names of the kernels that `calls` launch, none of which is compiled."""
    from triton.runtime.jit import JITFunction

    found: list[str] = []

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        found.append(kernel.__name__)

    with mock.patch.object(JITFunction, "run", run):
        calls()
    return found


def loop_of(ptx: str) -> str:
    """The innermost loop of a kernel that multiplies."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    branches = [(labels.get(found[1], len(ptx)), found.start()) for found in re.finditer(r"bra\S*\s+(\$L\w+);", ptx)]
    loops = [ptx[first:last] for first, last in branches if first < last and "mma" in ptx[first:last]]
    return min(loops, key=len)


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(kernel.arg_names)
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, (name, param) in enumerate(zip(names, kernel.params, strict=True)):
        value = values[name]
        if (
            param.is_constexpr
            or value is None
            or value is True
            or value is False
            or (type(value) is int and value == 1 and not param.do_not_specialize)
        ):
            signature[name] = "constexpr"
            constexprs[i,] = value
            continue
        if hasattr(value, "block_shape"):
            signature[name] = _descriptor(value)
        elif type(value) is torch.Tensor:
            signature[name] = _POINTERS[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif type(value) is float:
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    launch = {k: v for k, v in options.items() if k in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    registers, stack = _resources(binary.asm["cubin"])
    ptx, ttir, ttgir = (binary.asm.get(kind, "") for kind in ("ptx", "ttir", "ttgir"))  # Gluon has no TTIR
    shared = binary.metadata.shared
    return Compiled(kernel.__name__, shared, registers, stack, ptx, ttir, ttgir, binary.asm["cubin"])


def _descriptor(value: Any) -> str:
    """The type of a tensor descriptor; Gluon's say how their blocks lie in shared memory."""
    layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
    return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}{layout}>"


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    text = _told_by("cuobjdump", ("-res-usage",), cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else (None, None)


def _told_by(name: str, options: Sequence[str], cubin: bytes) -> str | None:
    """What one of the assembler's companions prints of a kernel; None where it is not installed."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    program = str(tool) if tool.exists() else shutil.which(name)
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, *options, file.name], capture_output=True, text=True, check=False).stdout
