"""Pieces shared by the three models: norms, RoPE tables, windowed attention on whole sequences.

Legend: B batch, T positions, H hidden, N query heads, K KV heads, D head dim, W window, S = T / W.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GemmaNorm(nn.Module):
    """RMS norm, the weight multiplied in fp32 before the cast (spec section 1.2)."""

    def __init__(self, dim: int, eps: float, init: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), init))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> the same shape and dtype."""
        return (unit(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class QwenNorm(GemmaNorm):
    """RMS norm, cast before the weight (spec section 5.2)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> the same shape and dtype."""
        return self.weight.to(x.dtype) * unit(x.float(), self.eps).to(x.dtype)


def unit(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def sliding_frequencies(dim: int, theta: float) -> Tensor:
    """Ordinary RoPE frequencies, [dim / 2]."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def proportional_frequencies(dim: int, theta: float, fraction: float = 0.25) -> Tensor:
    """Gemma 4's full-layer frequencies: the first fraction rotates, the rest is identity (spec section 1.5)."""
    freq = sliding_frequencies(dim, theta)
    freq[int(fraction * dim // 2) :] = 0.0
    return freq


def rope_table(freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [..., D], in fp32."""
    angles = positions.float()[..., None] * freq
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate-half RoPE; x [B, T, N, D], table [T, D] or [B, T, D]."""
    cos, sin = (part.to(x.dtype).unsqueeze(-2) for part in table)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def spread(x: Tensor, heads: int) -> Tensor:
    """Repeat KV heads to the query heads: [B, T, K, D] -> [B, T, N, D]."""
    return x.repeat_interleave(heads // x.shape[2], 2)


def full_attention(q: Tensor, k: Tensor, v: Tensor, strict: bool, scale: float = 1.0) -> Tensor:
    """Causal attention of [B, T, N, D]; `strict` hides a position's own key (an MTP anchor sees keys 0..C-1)."""
    q, k, v = (x.transpose(1, 2) for x in (q, spread(k, q.shape[2]), spread(v, q.shape[2])))
    if strict:
        # Anchor 0 would be left with no key; it gets its own and is never drafted from.
        T = q.shape[2]
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(-1)
        mask[0, 0] = True
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int, strict: bool) -> Tensor:
    """Windowed causal attention of [B, T, N, D], exactly `window` keys: i-W < j <= i, or i-W <= j < i if strict.

    Queries go in blocks of W; each block needs only its own and the previous block's keys.
    """
    B, T, N, D = q.shape
    pad = -T % window
    if pad:
        q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
    S = q.shape[1] // window
    k, v = spread(k, N), spread(v, N)

    def folded(x: Tensor) -> Tensor:  # [B, S*W, N, D] -> [B, S*N, W, D]
        return x.view(B, S, window, N, D).transpose(2, 3).reshape(B, S * N, window, D)

    def with_previous(x: Tensor) -> Tensor:
        x = x.view(B, S, window, N, D)
        previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return torch.cat([previous, x], 2).transpose(2, 3).reshape(B, S * N, 2 * window, D)

    row, column = torch.arange(window, device=q.device), torch.arange(2 * window, device=q.device)
    low = row[:, None] + (0 if strict else 1)
    seen = (column >= low) & (column < low + window)  # [W, 2W]
    first = seen & (column >= window)
    if strict:
        first = first | ((row == 0)[:, None] & (column == window))  # anchor 0 has no key; give it one, unused
    mask = torch.cat([first[None], seen.expand(S - 1, -1, -1)]).repeat_interleave(N, 0)
    out = functional.scaled_dot_product_attention(
        folded(q), with_previous(k), with_previous(v), attn_mask=mask, scale=1.0
    )
    return out.view(B, S, N, window, D).transpose(2, 3).reshape(B, S * window, N, D)[:, :T]


class GeGLU(nn.Module):
    """down( gelu_tanh(gate x) * up x ), spec section 1.7."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
