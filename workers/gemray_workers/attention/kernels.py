"""The attention kernel behind each backend's name."""

from __future__ import annotations

from gemray_workers.messages import Choice
from gemray_workers.model.attention import AttentionKernel


def attention_kernel(choice: Choice) -> AttentionKernel:
    """The kernel of a backend that was chosen; KeyError when there is no backend of this name."""
    return {"torch": _torch, "triton": _triton}[choice.chosen]()


def _torch() -> AttentionKernel:
    from gemray_kernels.reference.paged_attention import paged_attention

    return paged_attention


def _triton() -> AttentionKernel:
    from gemray_kernels.triton.paged_attention import paged_attention

    return paged_attention
