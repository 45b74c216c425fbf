"""Times products with packed weights, beside the time of their bytes alone and beside bfloat16 products.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m packed_kernels --out results.json \
        [--formats "int4 group 32,fp8 channel"] [--parts decode,prompts]

Medians of replays of a CUDA graph over copies that exceed the cache together, for the layers of 31B; share is the time
of the packed bytes at the rate of a sum over 2 GiB over the time taken. Every tile's product is checked first. Programs
are compiled in several processes. At the end of a format a layer's products run one after the other between the norms
that lie there, as a decoding step has them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import triton

from decode_kernels.weights import WEIGHTS
from packed_kernels.decode import Case, layer, sweep
from packed_kernels.programs import check, compile_all, first_jobs
from packed_kernels.prompts import prompts
from packed_kernels.timing import read_rate
from support.kernels.packed_cases import FORMATS

LAYER = ("qkv sliding", "o sliding", "gate_up", "down")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4 group 32,nvfp4,fp8 channel")
    parser.add_argument("--parts", default="decode,prompts")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    forms, parts = [FORMATS[name] for name in arguments.formats.split(",")], arguments.parts.split(",")
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"-- {what}: {time.monotonic() - started:.0f} s", flush=True)

    compile_all([job for form in forms for job in first_jobs(form, parts)])
    rate = read_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; reads "
        f"{rate / 1e12:.2f} TB/s",
        flush=True,
    )
    say("compiled")
    weights = [weight for weight in WEIGHTS if weight.model == "31B" and weight.name in LAYER]
    results: list[dict[str, object]] = []
    cases: dict[str, list[Case]] = {}
    for form in forms:
        check(form, parts)
        if "decode" in parts:
            cases[form.name] = [sweep(form, weight, rate) for weight in weights]
        say(f"swept {form.name}")
    compile_all([job for of_form in cases.values() for case in of_form for job in case.jobs()])
    say("compiled")
    for form in forms:
        results += [case.more(rate) for case in cases.get(form.name, ())]
        results += [layer(cases[form.name], rate)] if form.name in cases else []
        cases.pop(form.name, None)  # and their memory
        if "prompts" in parts:
            results += [prompts(form, weight) for weight in weights if weight.name != "o sliding"]
        say(form.name)
        if arguments.out:
            arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
