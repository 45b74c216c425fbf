"""The time of one product over copies of its weight that exceed the cache together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, median_us, random
from decode_kernels.weights import Weight
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.triton.packed_linear import PackedTile
from gemray_kernels.triton.packed_prompts import PromptTile
from packed_kernels.programs import product
from packed_kernels.tiles import short
from support.kernels.packed_cases import PackedFormat, random_packed


def read_rate() -> float:
    """Bytes a second of a sum over 2 GiB."""
    data = random(1 << 30)
    return data.nbytes / median_us([data.sum]) * 1e6


def copies(form: PackedFormat, weight: Weight) -> tuple[list[TiledWeight], int]:
    """As many copies of a weight as exceed the cache, and the bytes of each."""
    whole = random_packed(form, weight.num_out, weight.num_in, device="cuda")
    assert whole.tiling is not None
    laid = laid_out(whole, whole.tiling)
    num_bytes = laid.words_BOC.nbytes + (0 if laid.scale_BO is laid.factor_O else laid.scale_BO.nbytes)
    others = range(max(2, 3 * CACHE_BYTES // num_bytes + 1) - 1)
    return [
        laid,
        *(replace(laid, words_BOC=laid.words_BOC.clone(), scale_BO=laid.scale_BO.clone()) for _ in others),
    ], num_bytes


def times(weight: Weight, x: Tensor, sets: Sequence[TiledWeight], tile: PackedTile | PromptTile) -> float:
    """Microseconds of one product; infinite for a tile that does not run."""
    try:
        return median_us([partial(product, weight, x, w, tile) for w in sets])
    except Exception as reason:
        print("refused", short(tile), str(reason)[:100], flush=True)
        return float("inf")
