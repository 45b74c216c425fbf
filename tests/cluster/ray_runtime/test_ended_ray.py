"""What is left to end of a gang whose Ray this process has already left."""

from __future__ import annotations

from typing import Any, cast

import pytest
import ray

from gemray_cluster.ray_runtime.launcher import RayRank


async def test_a_rank_is_not_asked_for_where_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would answer that it has not been started yet; the rank ended with it."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    await RayRank(cast(Any, "no actor, so that ray.kill fails"), None).kill()
