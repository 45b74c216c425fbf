"""The attention kernel behind each backend's name."""

from __future__ import annotations

from gemray_kernels.numerics import Numerics
from gemray_workers.messages import Choice
from gemray_workers.model.attention import AttentionKernel


def attention_kernel(choice: Choice, numerics: Numerics = Numerics.FAST) -> AttentionKernel:
    """The kernel of a backend that was chosen; KeyError when there is no backend of this name.

    Args:
        choice: the backend.
        numerics: exact ones attend causally alone: they are for a target, whose numbers a drafter's need not equal.
    """
    return {
        ("torch", Numerics.FAST): _torch,
        ("torch", Numerics.EXACT): _exact_torch,
        ("triton", Numerics.FAST): _triton,
        ("triton", Numerics.EXACT): _exact_triton,
    }[choice.chosen, numerics]()


def _torch() -> AttentionKernel:
    from gemray_kernels.reference.paged_attention import paged_attention

    return paged_attention


def _exact_torch() -> AttentionKernel:
    from gemray_kernels.reference.exact_paged_attention import exact_paged_attention

    return exact_paged_attention


def _triton() -> AttentionKernel:
    from gemray_kernels.triton.paged_attention import paged_attention

    return paged_attention


def _exact_triton() -> AttentionKernel:
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    return exact_paged_attention
