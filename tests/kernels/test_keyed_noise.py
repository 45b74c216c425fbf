"""Philox4x32-10 against published vectors and an independent implementation; the noise against its law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from gemray_kernels.reference.keyed_noise import gumbel_of_word, keyed_gumbel, philox4x32

WORD = st.integers(0, 2**32 - 1)


def python_philox(key: tuple[int, ...], counter: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers, as the paper's figure states it: two 2-word Feistel lanes, then a swap."""
    (left0, right0, left1, right1), keys = counter, list(key)
    for _ in range(10):
        wide0, wide1 = 0xD2511F53 * left0, 0xCD9E8D57 * left1
        left0, right0, left1, right1 = (
            (wide1 // 2**32) ^ right0 ^ keys[0],
            wide1 % 2**32,
            (wide0 // 2**32) ^ right1 ^ keys[1],
            wide0 % 2**32,
        )
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return left0, right0, left1, right1


def python_gumbel(seed: int, position: int, token: int) -> float:
    key = (seed % 2**32, seed // 2**32)
    word = python_philox(key, (position % 2**32, position // 2**32, token // 4, 0))[token % 4]
    w = (word + 0.5) / 2**32
    return -math.log(-math.log1p(-w))


def torch_philox(key: tuple[int, ...], counter: tuple[int, ...]) -> tuple[int, ...]:
    words = philox4x32(
        tuple(torch.tensor(k) for k in key),  # type: ignore[arg-type]
        tuple(torch.tensor(c) for c in counter),  # type: ignore[arg-type]
    )
    return tuple(int(w) for w in words)


@pytest.mark.parametrize("philox", [torch_philox, python_philox])
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(philox: Any, key: Any, counter: Any, expected: Any) -> None:
    assert philox(key, counter) == expected


@given(st.tuples(WORD, WORD), st.tuples(WORD, WORD, WORD, WORD))
@settings(max_examples=200)
def test_philox_equals_python_integers(key: Any, counter: Any) -> None:
    assert torch_philox(key, counter) == python_philox(key, counter)


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.one_of(st.integers(0, 2**20), st.integers(0, 2**62)),
    tokens=st.lists(st.integers(0, 262143), min_size=1, max_size=9),
)
@example(seed=115038306922888, position=1485, tokens=[178])  # w is 0.9995
@settings(max_examples=100)
def test_noise_is_keyed_as_documented(seed: int, position: int, tokens: list[int]) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    arguments = torch.tensor([signed]), torch.tensor([position])
    expected = torch.tensor([[python_gumbel(seed, position, token) for token in tokens]], dtype=torch.float64)
    for ids in (torch.tensor(tokens), torch.tensor([tokens])):
        noise = keyed_gumbel(*arguments, ids, torch.float64)
        torch.testing.assert_close(noise, expected, rtol=0, atol=1e-12)
        single = keyed_gumbel(*arguments, ids, torch.float32)
        assert single.dtype is torch.float32
        allowed = 2e-6 * (1 + expected.abs()) + error_of_rounding_w(expected)
        assert torch.all((single.double() - expected).abs() <= allowed)


def error_of_rounding_w(noise: torch.Tensor) -> torch.Tensor:
    """What two roundings of w to float32 do to noise: little but where w is near 1, whose noise no argmax looks at."""
    log = (-noise).exp()  # of 1 / (1 - w)
    error_of_w = -torch.expm1(-log) * torch.finfo(torch.float32).eps / 2
    return error_of_w / (log * (-log).exp())


def test_an_id_has_the_same_noise_in_any_company() -> None:
    """Bit for bit: shards, batches and candidate lists must agree."""
    seeds, positions = torch.arange(-3, 4), torch.arange(7) * 5
    whole = keyed_gumbel(seeds, positions, torch.arange(1000), torch.float64)
    for ids in (torch.arange(501, 777), torch.tensor([3, 999, 4, 4, 0])):
        assert torch.equal(keyed_gumbel(seeds, positions, ids, torch.float64), whole[:, ids])
        assert torch.equal(keyed_gumbel(seeds, positions, ids.expand(7, -1), torch.float64), whole[:, ids])
    assert torch.equal(keyed_gumbel(seeds[2:3], positions[2:3], torch.arange(1000), torch.float64), whole[2:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_words_give_finite_noise(dtype: torch.dtype) -> None:
    largest, smallest = gumbel_of_word(torch.tensor([0, 2**32 - 1]), dtype).tolist()
    assert largest == pytest.approx(33 * math.log(2), rel=1e-6)  # -log(2**-33)
    assert -3.2 < smallest < -2.7


def test_large_noise_keeps_its_precision_in_float32() -> None:
    words = torch.arange(2000)
    single, double = gumbel_of_word(words, torch.float32), gumbel_of_word(words, torch.float64)
    torch.testing.assert_close(single.double(), double, rtol=3e-7, atol=0)
    assert single.unique().numel() == 2000


def test_noise_follows_the_gumbel_law() -> None:
    noise = keyed_gumbel(torch.arange(50), torch.arange(50) % 7, torch.arange(4000), torch.float64).numpy()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3
    # exp(-exp(-g)) is uniform: equal counts in 256 bins for each of the four lanes.
    for lane in range(4):
        uniform = np.exp(-np.exp(-noise[:, lane::4])).ravel()
        assert stats.chisquare(np.histogram(uniform, 256, (0, 1))[0]).pvalue > 1e-3


def test_noise_is_independent_over_seeds_positions_and_ids() -> None:
    size = 60
    seeds, positions = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    noise = keyed_gumbel(seeds.flatten(), positions.flatten(), torch.arange(60), torch.float64)
    cube = noise.view(size, size, 60).numpy()  # seed, position, id
    pairs = {
        "next seed": (cube[:-1], cube[1:]),
        "next position": (cube[:, :-1], cube[:, 1:]),
        "next id": (cube[..., :-1], cube[..., 1:]),
        "next group of ids": (cube[..., :-4], cube[..., 4:]),
        "seed and position swapped": (cube[np.triu_indices(size, 1)], cube.swapaxes(0, 1)[np.triu_indices(size, 1)]),
        "high word of the seed": (
            cube[:, 0],
            keyed_gumbel(torch.arange(size) << 32, torch.zeros(size).long(), torch.arange(60), torch.float64).numpy(),
        ),
    }
    for name, (a, b) in pairs.items():
        correlation = float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
        assert abs(correlation) * math.sqrt(a.size) < 4, name
