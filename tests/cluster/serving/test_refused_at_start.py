"""A model too large for this machine's memory, or not the one of its config, is refused before Ray is started."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gemray_cluster.ray_runtime.session import RaySession
from gemray_cluster.serving.app import serving
from gemray_cluster.settings.errors import InvalidSetting
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.errors import CapacityError, CheckpointError
from gemray_workers.rank import memory
from support.checkpoints.servable_checkpoint import write_servable_checkpoint

GIB = 1 << 30


class RayIsNext(Exception):
    """What comes before Ray has found nothing."""


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing waits for memory, and nothing starts Ray."""

    async def opened(config: object, *, num_ranks: int) -> Any:
        raise RayIsNext

    monkeypatch.setattr(memory, "PATIENCE_S", 0.0)
    monkeypatch.setattr(RaySession, "open", opened)
    return monkeypatch


def settings(directory: Path, **more: Any) -> ServeSettings:
    model = str(write_servable_checkpoint(directory))
    return ServeSettings(model=model, **{"device": "cpu", "kv_memory": 64 << 20, "port": 0, **more})


async def test_ranks_that_fit_neither_alone_nor_together(tmp_path: Path, no_ray: pytest.MonkeyPatch) -> None:
    no_ray.setattr(memory, "free_bytes", lambda device: 1 << 20)
    words = "this machine has 0.00 GiB of memory free, .* are wanted for 4 ranks: weights 0.00 GiB, KV pages"
    with pytest.raises(CapacityError, match=words):
        async with serving(settings(tmp_path, tp=2, replicas=2)):
            pass


@pytest.mark.parametrize("more", [{}, {"address": "127.0.0.1:6379"}, {"device": "cuda", "dtype": "float32"}])
async def test_what_fits_or_runs_elsewhere_is_not_refused(
    tmp_path: Path, no_ray: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    no_ray.setattr(memory, "free_bytes", lambda device: 1 << 20 if more else GIB)
    with pytest.raises(RayIsNext):
        async with serving(settings(tmp_path, **more)):
            pass


async def test_a_drafter_that_no_node_can_have(tmp_path: Path, no_ray: pytest.MonkeyPatch) -> None:
    absent = (str(tmp_path / "nope"),)
    words = r"drafter = '.*/nope' \(from the default\) is not allowed: there is no such directory; a path, ORG/NAME, or"
    for device in ("cpu", "auto"):
        with pytest.raises(InvalidSetting, match=words):
            async with serving(settings(tmp_path / device, device=device, drafter=absent)):
                pass
    with pytest.raises(RayIsNext):  # the nodes of a cluster may have what this machine has not
        async with serving(settings(tmp_path / "joined", drafter=absent, address="127.0.0.1:6379")):
            pass


async def test_weights_that_do_not_fit_the_model(tmp_path: Path, no_ray: pytest.MonkeyPatch) -> None:
    """Here alone: the nodes of a cluster may have others."""
    damaged = settings(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({**tensors, name: tensors[name].T.contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)} has shape \[128, 256\], the model needs \[256, 128\]"
    ):
        async with serving(damaged):
            pass
    for more in ({"address": "127.0.0.1:6379"}, {"random_weights": True}):
        with pytest.raises(RayIsNext):
            async with serving(replace(damaged, **more)):
                pass


async def test_memory_that_becomes_free_is_waited_for(tmp_path: Path, no_ray: pytest.MonkeyPatch) -> None:
    """As the server before this one may still be ending."""
    free = iter([1 << 20, GIB])
    no_ray.setattr(memory, "PATIENCE_S", 60.0)
    no_ray.setattr(memory, "free_bytes", lambda device: next(free))
    with pytest.raises(RayIsNext):
        async with serving(settings(tmp_path)):
            pass
    assert next(free, None) is None
