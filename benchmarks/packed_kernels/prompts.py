"""A prompt's products."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import torch

from decode_kernels.measure import median_us, random
from decode_kernels.weights import Weight
from gemray_kernels.triton.packed_dequantize import dequantized as written_down
from gemray_kernels.triton.packed_tile_choice import PROMPT_TILES
from packed_kernels.programs import PROMPT_ROWS
from packed_kernels.tiles import short
from packed_kernels.timing import copies, times
from support.kernels.packed_cases import PackedFormat


def prompts(form: PackedFormat, weight: Weight) -> dict[str, object]:
    """Microseconds of a prompt's product in bfloat16, with numbers that are written down first, and in tiles."""
    sets = copies(form, weight)[0][:2]
    plain = [random(weight.num_out, weight.num_in, gain=weight.num_in**-0.5) for _ in range(2)]
    x = random(PROMPT_ROWS, weight.num_in)
    result = {
        "bfloat16": median_us([partial(torch.nn.functional.linear, x, w) for w in plain]),
        "written down": median_us([lambda w=w: torch.nn.functional.linear(x, written_down(w)) for w in sets]),  # type: ignore[misc]
        "written down alone": median_us([partial(written_down, w) for w in sets]),
    }
    for tile in PROMPT_TILES:
        for splits in (1, 2, 3) if weight.num_out < 8192 else (1,):
            cut = replace(tile, splits=splits)
            result[short(cut)] = times(weight, x, sets, cut)
    cells = ", ".join(f"{name} {us:.0f}" for name, us in result.items())
    print(f"{form.name} {weight.name}, {PROMPT_ROWS} rows: {cells}", flush=True)
    return {"format": form.name, "weight": asdict(weight), "prompt us": result}
