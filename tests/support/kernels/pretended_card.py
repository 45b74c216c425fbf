"""An H100 that Triton compiles for and that is not here: a rank on CPU tensors takes the card's kernels, none of which
is ever launched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

CARD = torch.device("cuda", 0)


class PretendedDriver:
    """What Triton asks of a driver before a launch."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> None:
        """Nothing is launched."""


@contextmanager
def pretended_card() -> Iterator[None]:
    """Ranks that are built meanwhile have Triton's kernels. Programs that Triton holds for the card go in the end."""
    from triton.runtime import driver

    from gemray_kernels import table
    from gemray_kernels.numerics import Numerics
    from gemray_kernels.triton.exact_attention import exact_paged_attention
    from gemray_kernels.triton.paged_attention import paged_attention
    from gemray_workers.execution import slots
    from gemray_workers.model import weight_sharding
    from gemray_workers.rank import drafter_rank, target_rank
    from gemray_workers.rank.blueprint import Blueprint
    from gemray_workers.sampling import state
    from gemray_workers.sampling.kernels import choice_kernels

    def kernels_for(device: torch.device, dtype: torch.dtype, numerics: Numerics = Numerics.FAST) -> table.Kernels:
        return table.kernels_for(CARD, dtype, numerics)

    def attention_kernel(choice: Any, numerics: Numerics = Numerics.FAST, scratch: Any = None) -> Any:
        return paged_attention if numerics is Numerics.FAST else exact_paged_attention

    def why_eager(_blueprint: Blueprint) -> str | None:
        return None

    with (
        mock.patch.object(driver, "_active", PretendedDriver()),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(weight_sharding, "kernels_for", kernels_for),
        mock.patch.object(slots, "row_kernels_for", return_value=table.row_kernels_for(CARD)),
        mock.patch.object(state, "choice_kernels", lambda _, dtype: choice_kernels(CARD, dtype)),
        mock.patch.object(target_rank, "attention_kernel", attention_kernel),
        mock.patch.object(drafter_rank, "attention_kernel", attention_kernel),
        mock.patch.object(Blueprint, "why_eager", why_eager),
    ):
        try:
            yield
        finally:
            forget_programs()


def forget_programs() -> None:
    """Let Triton hold no program of ours any more."""
    from triton.runtime.jit import JITFunction

    for module in [m for name, m in sys.modules.items() if name.startswith("gemray_kernels.triton")]:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
