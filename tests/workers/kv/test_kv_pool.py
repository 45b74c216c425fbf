from __future__ import annotations

import dataclasses

import pytest
import torch

from gemray_workers.errors import InvalidField
from gemray_workers.kv.pool import KVPools
from gemray_workers.kv.spec import KVGroupSpec

CPU = torch.device("cpu")
SPECS = [
    KVGroupSpec("sliding", (0,), 2, 4, 3, 5, torch.float64),
    KVGroupSpec("full", (1,), 1, 8, 2, None, torch.float32),
]


@pytest.fixture
def pools() -> KVPools:
    return KVPools({0: None, 1: None, 2: 0, 3: 1}, SPECS, {"sliding": 4, "full": 6}, device=CPU)


def test_each_owner_has_pages_of_its_group_and_a_null_page(pools: KVPools) -> None:
    sliding, full = pools.caches.writer(0), pools.caches.writer(1)
    for pages in (sliding.k_pages, sliding.v_pages):
        assert pages.shape == (5, 3, 2, 4)
        assert pages.dtype == torch.float64
    assert full.k_pages.shape == full.v_pages.shape == (7, 2, 1, 8)
    assert pools.num_bytes == sum((n + 1) * spec.page_bytes for spec, n in zip(SPECS, (4, 6), strict=True))
    assert not full.k_pages.any()


def test_shared_layers_read_their_donor_and_cannot_write(pools: KVPools) -> None:
    caches, ones = pools.caches, torch.ones(1, 2, 4, dtype=torch.float64)
    caches.writer(0).write(ones, 2 * ones, torch.tensor([3 * 2 + 1]))
    assert caches.reader(2).k_pages[2, 1].eq(1).all()
    assert caches.reader(2).v_pages[2, 1].eq(2).all()
    assert caches.reader(2).v_pages.count_nonzero() == 8
    assert caches.group_of(2) == "sliding"
    assert caches.group_of(3) == "full"
    assert not hasattr(caches.reader(2), "write")
    with pytest.raises(KeyError):
        caches.writer(2)


def test_poison_reaches_the_named_pages_of_the_group_alone(pools: KVPools) -> None:
    pools.poison({"sliding": [2, 4], "full": []})
    sliding, full = pools.caches.reader(0), pools.caches.reader(1)
    for pages in (sliding.k_pages, sliding.v_pages):
        assert pages[[2, 4]].isnan().all()
        assert not pages[[0, 1, 3]].isnan().any()
    assert not full.k_pages.isnan().any()


def test_a_layer_without_kv_is_refused() -> None:
    orphan = dataclasses.replace(SPECS[1], layers=(3,))
    with pytest.raises(InvalidField, match=r"layers\[1\]\.kv_donor = None .*\[0, 3\]"):
        KVPools({0: None, 1: None, 2: 0, 3: None}, [SPECS[0], orphan], {"sliding": 1, "full": 1}, device=CPU)
