"""A Ray of our own has no monitor and no dashboard where Ray lets us; `test_serve_signals.py` looks at a real one."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import parameter, services

from gemray_cluster.ray_runtime.unused_processes import without_unused_processes


def test_they_are_left_out_in_the_block_alone() -> None:
    before = parameter.RayParams, services.start_api_server
    with without_unused_processes():
        params = parameter.RayParams(num_cpus=3)
        assert (params.no_monitor, params.num_cpus) == (True, 3)
        start: Any = services.start_api_server
        assert start(False, False, "host", "gcs", port=None) == (None, None)
    assert (parameter.RayParams, services.start_api_server) == before


class OtherParams:
    """Those of a Ray that is told otherwise what to start."""

    def __init__(self, num_cpus: int) -> None:
        self.num_cpus = num_cpus


@pytest.mark.parametrize("name", ["RayParams", "start_api_server", "no_monitor"])
def test_a_ray_that_starts_them_otherwise_starts_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "no_monitor":
        monkeypatch.setattr(parameter, "RayParams", OtherParams)
    else:
        monkeypatch.delattr(parameter if name == "RayParams" else services, name)
    before = vars(parameter).copy(), vars(services).copy()
    with without_unused_processes():
        assert (vars(parameter), vars(services)) == before
