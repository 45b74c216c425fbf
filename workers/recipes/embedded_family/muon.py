"""Muon for the matrices, AdamW for the rest, stepping all matrices of one shape together.

Muon: K. Jordan et al. 2024, momentum orthogonalised by five Newton-Schulz steps with (3.4445, -4.7750, 2.0315).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each [..., m, n] matrix to about 1."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Optimizer:
    """`matrices` by Muon, everything else of `module` by AdamW; `step(scale)` scales both learning rates."""

    def __init__(
        self, module: nn.Module, lr_matrix: float, lr_rest: float, decay: float = 0.02, skip: Iterable[str] = ()
    ) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim == 2 and "embed" not in name and not any(s in name for s in skip):
                groups[parameter.shape].append(parameter)
            else:
                rest.append(parameter)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in groups.items()]
        self.lr_matrix, self.lr_rest, self.decay = lr_matrix, lr_rest, decay
        fused = rest[0].is_cuda
        self.adam = torch.optim.AdamW(rest, lr=lr_rest, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, scale: float, momentum: float = 0.95) -> None:
        """One update from the parameters' gradients, which are cleared."""
        for parameters, buffer in self.groups:
            grads = torch.stack([p.grad for p in parameters])
            buffer.lerp_(grads, 1 - momentum)
            update = orthogonal(grads.lerp_(buffer, momentum)).float()
            rows, columns = update.shape[-2:]
            rate = self.lr_matrix * scale
            torch._foreach_mul_(parameters, 1 - rate * self.decay)
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-rate * max(1.0, rows / columns) ** 0.5)
        self.adam.param_groups[0]["lr"] = self.lr_rest * scale
        self.adam.step()
        for parameters, _ in self.groups:
            for p in parameters:
                p.grad = None
        self.adam.zero_grad(set_to_none=True)
