"""The attention kernel behind each backend's name."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gemray_kernels.numerics import Numerics
from gemray_workers.messages import Choice
from gemray_workers.model.attention import AttentionKernel


def attention_kernel(
    choice: Choice, numerics: Numerics = Numerics.FAST, scratch: Tensor | None = None
) -> AttentionKernel:
    """The kernel of a backend that was chosen; KeyError when there is no backend of this name.

    Args:
        choice: the backend.
        numerics: exact ones attend causally alone: they are for a target, whose numbers a drafter's need not equal.
        scratch: memory that all calls share (`gemray_kernels.attention_scratch`); Triton's kernels alone use it.
    """
    return {
        ("torch", Numerics.FAST): _torch,
        ("torch", Numerics.EXACT): _exact_torch,
        ("triton", Numerics.FAST): _triton,
        ("triton", Numerics.EXACT): _exact_triton,
    }[choice.chosen, numerics](scratch)


def _torch(_: Tensor | None) -> AttentionKernel:
    from gemray_kernels.reference.paged_attention import paged_attention

    return paged_attention


def _exact_torch(_: Tensor | None) -> AttentionKernel:
    from gemray_kernels.reference.exact_paged_attention import exact_paged_attention

    return exact_paged_attention


def _triton(scratch: Tensor | None) -> AttentionKernel:
    from gemray_kernels.triton.paged_attention import paged_attention

    return paged_attention if scratch is None else partial(paged_attention, scratch=scratch)


def _exact_triton(scratch: Tensor | None) -> AttentionKernel:
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    return exact_paged_attention if scratch is None else partial(exact_paged_attention, scratch=scratch)
