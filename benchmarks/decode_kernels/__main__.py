"""The command line: which parts to time, and where the numbers go."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

import decode_kernels
from decode_kernels.attention import attention
from decode_kernels.experts import experts
from decode_kernels.layers import layers
from decode_kernels.linears import linears
from decode_kernels.measure import Report
from decode_kernels.small import small


def main() -> None:
    """Time the parts that were asked for; exit with 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        prog="decode_kernels", description=decode_kernels.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="small,layers,experts,attention,linears")
    parser.add_argument("--only", default="", help="linear layers whose model and name contain this")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    parts: dict[str, Callable[[Report], None]] = {
        "linears": partial(linears, only=arguments.only),
        "experts": experts,
        "attention": attention,
        "small": small,
        "layers": layers,
    }
    for part in arguments.parts.split(","):
        started = time.monotonic()
        try:
            parts[part](report)
        except Exception:
            report.fault(f"{part}: {traceback.format_exc()[-3000:]}")
        print(f"-- {part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if out := os.environ.get("OUT"):
            Path(out, "decode_kernels.json").write_text(json.dumps(report.rows, default=str))
    print(f"{len(report.faults)} faults")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
