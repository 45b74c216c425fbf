"""torch.compile on the repeated layers only: a few small graphs instead of one large one, compiled once a process."""

from __future__ import annotations

import torch

_done = False


def speed_up(device: torch.device) -> bool:
    """Compile the layers' forwards on CUDA; returns whether compiled functions are to be used."""
    global _done  # noqa: PLW0603
    if device.type != "cuda":
        return False
    if not _done:
        from .dflash import BlockLayer
        from .target import Layer

        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.automatic_dynamic_shapes = False
        Layer.forward = torch.compile(Layer.forward)  # type: ignore[method-assign]
        Layer.query_only = torch.compile(Layer.query_only)  # type: ignore[method-assign]
        BlockLayer.forward = torch.compile(BlockLayer.forward)  # type: ignore[method-assign]
        _done = True
    torch.compiler.set_stance("default")
    return True
