"""Bits of words: what masks leave of a register are the codes that were joined."""

from __future__ import annotations

import pytest
import torch

from gemray_kernels.packed_words import MASKED, joined


@pytest.mark.parametrize("name", sorted(MASKED))
def test_masks_leave_each_code_alone(name: str) -> None:
    """Every plane of either word of a pair, whatever its neighbours are."""
    masked = MASKED[name]
    bits, planes = len(masked.places), len(masked.planes)
    generator = torch.Generator().manual_seed(0)
    codes_OBPC = torch.randint(1 << bits, (8, 3, planes, 16), generator=generator, dtype=torch.int32)
    words_OBC = joined(name, codes_OBPC)
    assert int(words_OBC.min()) >= 0
    assert int(words_OBC.max()) < 1 << 16
    for o, b, pair in torch.cartesian_prod(torch.arange(8), torch.arange(3), torch.arange(8)).tolist():
        low, high = words_OBC[o, b, 2 * pair : 2 * pair + 2].tolist()
        for plane, make in enumerate(masked.planes):
            left = make(low | high << 16)
            for half in range(2):
                code = sum((left >> (16 * half + place) & 1) << bit for bit, place in enumerate(masked.places))
                assert code == int(codes_OBPC[o, b, plane, 2 * pair + half])


@pytest.mark.parametrize("name", sorted(MASKED))
def test_nothing_is_a_word_of_zeros(name: str) -> None:
    """As what lies behind the last input is taken for."""
    assert not joined(name, torch.zeros(1, 1, len(MASKED[name].planes), 16, dtype=torch.int32)).any()
