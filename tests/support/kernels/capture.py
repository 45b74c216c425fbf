"""Calls on a CUDA device in a graph and one by one: none may wait for the device, and the graph must find the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def captured_and_eager(calls: Callable[[], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Each result of `calls` from the replay of a graph that holds them, beside the one that they have without a graph.

    What the capture left in the results is overwritten before the replay. The inputs must stay as they are.

    Raises:
        RuntimeError: a call that waits for the device.
    """
    eager = calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for tensor in captured:
        tensor.fill_(torch.nan)
    graph.replay()
    return list(zip(captured, eager, strict=True))
