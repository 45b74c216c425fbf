"""Layout of packed weights for kernels: which weights have one, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gemray_kernels.packed_tiles import UNITS, exact_tiling_of, laid_out, tiling_of, unit_words
from gemray_kernels.packed_weight import FP8, INT4, INT8, NVFP4, Code, Scaling
from support.kernels.packed_cases import FORMATS, random_packed

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("code", "group", "dtype", "first", "num_in", "scaling"),
    [
        (INT4, 32, torch.bfloat16, 0, 5376, Scaling.CODES),
        (INT4, 32, torch.bfloat16, 352, 352, Scaling.CODES),
        (INT4, 64, torch.bfloat16, 64, 128, Scaling.CODES),
        (INT4, 128, torch.float32, 0, 2112, Scaling.SUMS),
        (INT4, 5376, torch.float32, 0, 5376, Scaling.ROW),
        (INT8, 2816, torch.float32, 1408, 1408, Scaling.ROW),
        (FP8, 128, torch.float32, 256, 300, Scaling.SUMS),
        (NVFP4, 16, E4M3, 176, 176, Scaling.CODES),
        (INT4, 32, torch.float32, 0, 5376, None),
        (INT4, 32, torch.bfloat16, 176, 176, None),
        (INT4, 16, torch.bfloat16, 0, 256, None),
        (INT8, 32, torch.bfloat16, 0, 256, None),
        (NVFP4, 16, E4M3, 8, 64, None),
    ],
)
def test_which_weights_are_laid_out(
    code: Code, group: int, dtype: torch.dtype, first: int, num_in: int, scaling: Scaling | None
) -> None:
    tiling = tiling_of(code, group, dtype, first, num_in)
    assert (None if tiling is None else tiling.scaling) is scaling


@pytest.mark.parametrize(
    ("code", "group", "dtype", "first", "num_in", "leaves", "scaling"),
    [
        (INT4, 32, torch.bfloat16, 0, 5376, 1, Scaling.CODES),
        (INT4, 128, torch.bfloat16, 10752, 10752, 4, Scaling.CODES),
        (INT4, 128, torch.float32, 0, 21504, 8, Scaling.SUMS),
        (INT4, 32, torch.bfloat16, 0, 2112, 8, Scaling.EACH),
        (INT4, 32, torch.float32, 0, 5376, 1, Scaling.EACH),
        (INT8, 704, torch.bfloat16, 352, 352, 4, Scaling.ROW),
        (FP8, 128, torch.float32, 0, 21504, 8, Scaling.SUMS),
        (FP8, 128, torch.float32, 0, 2112, 8, Scaling.EACH),
        (NVFP4, 16, E4M3, 0, 21504, 8, Scaling.CODES),
        (NVFP4, 16, E4M3, 0, 704, 8, Scaling.EACH),
        (NVFP4, 16, E4M3, 88, 88, 1, Scaling.EACH),
    ],
)
def test_which_weights_are_laid_out_leaf_by_leaf(
    code: Code, group: int, dtype: torch.dtype, first: int, num_in: int, leaves: int, scaling: Scaling
) -> None:
    tiling = exact_tiling_of(code, group, dtype, first, num_in, leaves)
    assert tiling.scaling is scaling
    assert tiling.leaves == leaves


@pytest.mark.parametrize(
    ("code", "leaf", "words"),
    [
        (INT8, 88, 16),
        (INT8, 264, 32),
        (INT8, 96, 16),
        (FP8, 352, 64),
        (FP8, 1024, 64),
        (INT4, 88, 32),
        (INT4, 40, 16),
    ],
)
def test_short_leaves_have_small_units(code: Code, leaf: int, words: int) -> None:
    """As few inputs behind a leaf's end as planes of sixteen allow: 8 of 88 instead of 40."""
    assert unit_words(code, leaf) == words
    tiling = exact_tiling_of(code, 8 * leaf, torch.bfloat16, 0, 8 * leaf, 8)
    inputs = UNITS[code.name].planes * words
    assert tiling.words == words
    assert tiling.code_bytes == 8 * -(-leaf // inputs) * 2 * words


@pytest.mark.parametrize(("num_in", "words"), [(5376, 32), (704, 32), (352, 32), (176, 16), (64, 16)])
def test_units_of_nvfp4_are_large_where_that_takes_little_room(num_in: int, words: int) -> None:
    """192 words for 176 of 704 inputs, but not 64 for 48 of 176."""
    tiling = tiling_of(NVFP4, 16, E4M3, 0, num_in)
    assert tiling is not None
    units = -(-num_in // (4 * words))
    assert tiling.words == words
    assert (tiling.code_bytes, tiling.scale_bytes) == (2 * words * units, words // 4 * units)
    tiled = laid_out(random_packed(FORMATS["nvfp4"], 8, num_in, device="cpu"), tiling)
    assert tiled.runs == words // 16
    assert tiled.scale_BO.shape == (units, 8)
    assert tiled.scales_from(3).shape == (units, 5 * tiled.runs)
    assert tiled.scales_from(3).dtype == torch.int32


@pytest.mark.parametrize(("leaf", "words"), [(5376, 32), (2688, 32), (1024, 32), (176, 16), (48, 16)])
def test_units_of_leaves_of_nvfp4_are_large_where_that_takes_little_room(leaf: int, words: int) -> None:
    tiling = exact_tiling_of(NVFP4, 16, E4M3, 0, 8 * leaf, 8)
    units = 8 * -(-leaf // (4 * words))
    assert tiling.words == words
    assert (tiling.code_bytes, tiling.scale_bytes) == (2 * words * units, words // 4 * units)
    tiled = laid_out(random_packed(FORMATS["nvfp4"], 8, 8 * leaf, device="cpu", leaves=8), tiling)
    assert tiled.runs == words // 16
    assert tiled.scales_from(3).shape == (units, 5 * tiled.runs)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_experts", [None, 3])
def test_a_layout_takes_the_weight_s_own_memory(name: str, num_experts: int | None) -> None:
    weight = random_packed(FORMATS[name], 8, 256, device="cpu", num_experts=num_experts)
    assert weight.tiling is not None
    addresses = [t.untyped_storage().data_ptr() for t in (weight.codes_OW, weight.scale_OG)]
    bytes_before = weight.codes_OW.untyped_storage().nbytes()
    tiled = laid_out(weight, weight.tiling)
    lead = () if num_experts is None else (num_experts,)
    unit = tiled.unit
    assert tiled.words_BOC.shape == (*lead, 256 // unit.inputs, 8, unit.words)
    assert tiled.words_BOC.nbytes == bytes_before, "units that are whole take no more"
    assert tiled.words_BOC.data_ptr() == addresses[0]
    assert (tiled.scale_BO is tiled.factor_O) == (tiled.scaling is Scaling.ROW)
    if tiled.scaling is not Scaling.ROW:
        assert tiled.scale_BO.data_ptr() == addresses[1]


def test_memory_without_room_is_refused() -> None:
    """A part of a unit takes a whole one, for which the codes as they lie on disk have no room."""
    weight = random_packed(FORMATS["int4 group 32"], 8, 160, device="cpu")
    assert weight.tiling is not None
    bare = replace(weight, codes_OW=weight.codes_OW.clone())
    with pytest.raises(ValueError, match="640 bytes from place 0 for 1024"):
        laid_out(bare, weight.tiling)
