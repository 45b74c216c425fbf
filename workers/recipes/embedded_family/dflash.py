"""The DFlash drafter (spec section 5) over many anchors of a sequence at once.

Legend: B batch, T context positions, A anchors a sequence, R block rows (16), H hidden, N/K query/KV heads, D head
dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import QwenNorm, rope_table, rotate, sliding_frequencies, spread
from .settings import MASK_ID, DFlashSizes, TargetSizes
from .target import Target, Trace

Table = tuple[Tensor, Tensor]


class SwiGLU(nn.Module):
    """down( silu(gate x) * up x )."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockAttention(nn.Module):
    """Block queries over injected context keys and the block's own keys (spec section 5.2)."""

    def __init__(self, sizes: DFlashSizes, hidden: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = QwenNorm(self.dim, eps)
        self.k_norm = QwenNorm(self.dim, eps)

    def forward(self, a: Tensor, c: Tensor, at_block: Table, at_context: Table, mask: Tensor) -> Tensor:
        """Block rows [B, A*R, H], context [B, T, H], mask [B or 1, 1, A*R, T + A*R] -> [B, A*R, H]."""
        split, kv = (self.heads, self.dim), (self.kv_heads, self.dim)
        q = rotate(self.q_norm(self.q_proj(a).unflatten(-1, split)), at_block)
        k_block = rotate(self.k_norm(self.k_proj(a).unflatten(-1, kv)), at_block)
        k_context = rotate(self.k_norm(self.k_proj(c).unflatten(-1, kv)), at_context)
        k = torch.cat([k_context, k_block], 1)
        v = torch.cat([self.v_proj(c), self.v_proj(a)], 1).unflatten(-1, kv)
        q, k, v = (x.transpose(1, 2) for x in (q, spread(k, self.heads), spread(v, self.heads)))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.dim**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    """Pre-norm attention and MLP, as Qwen3."""

    def __init__(self, sizes: DFlashSizes, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = QwenNorm(hidden, eps)
        self.post_attention_layernorm = QwenNorm(hidden, eps)
        self.self_attn = BlockAttention(sizes, hidden, eps)
        self.mlp = SwiGLU(hidden, sizes.intermediate_size)

    def forward(self, x: Tensor, c: Tensor, at_block: Table, at_context: Table, mask: Tensor) -> Tensor:
        """[B, A*R, H] -> [B, A*R, H]."""
        x = x + self.self_attn(self.input_layernorm(x), c, at_block, at_context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """fc, hidden_norm, layers, norm; embedding and head are the target's."""

    def __init__(self, sizes: DFlashSizes, target: TargetSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.fc = nn.Linear(len(sizes.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = QwenNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(sizes, hidden, eps) for _ in sizes.layer_types)
        self.norm = QwenNorm(hidden, eps)
        self.register_buffer("freq", sliding_frequencies(sizes.head_dim, sizes.rope_theta), persistent=False)

    def masks(self, anchors_BA: Tensor, context: int) -> dict[str, Tensor]:
        """Layer type -> [B, 1, A*R, T + A*R], True where a block row sees a key (spec section 5.4)."""
        B, A = anchors_BA.shape
        R, window, device = self.sizes.block_size, self.sizes.sliding_window, anchors_BA.device
        row = torch.arange(R, device=device)
        block = torch.arange(A, device=device).repeat_interleave(R)  # which anchor a row belongs to
        start = anchors_BA.repeat_interleave(R, 1)  # [B, A*R]
        position = start + row.repeat(A)
        key = torch.arange(context, device=device)
        past = key < start[..., None]
        near = past & (position[..., None] - key < window)
        same = block[:, None] == block
        causal = same & (row.repeat(A)[:, None] >= row.repeat(A))
        full = torch.cat([past, same.expand(B, -1, -1)], -1)[:, None]
        sliding = torch.cat([near, causal.expand(B, -1, -1)], -1)[:, None]
        return {"full_attention": full, "sliding_attention": sliding}

    def forward(self, target: Target, ids_BT: Tensor, trace: Trace, anchors_BA: Tensor) -> Tensor:
        """Final states of every block row, [B, A, R, H]; row r predicts the token at anchor + r."""
        B, A = anchors_BA.shape
        T, R = ids_BT.shape[1], self.sizes.block_size
        feature = torch.cat([trace.blocks[i] for i in self.sizes.target_layer_ids], -1)
        c = self.hidden_norm(self.fc(feature))
        tokens = torch.full((B, A, R), MASK_ID, device=ids_BT.device)
        tokens[..., 0] = ids_BT.gather(1, anchors_BA)
        x = target.embed(tokens.flatten(1), c.dtype)
        position = (anchors_BA[..., None] + torch.arange(R, device=ids_BT.device)).flatten(1)
        at_block = rope_table(self.freq, position)
        at_context = rope_table(self.freq, torch.arange(T, device=ids_BT.device))
        masks = self.masks(anchors_BA, T)
        for kind, layer in zip(self.sizes.layer_types, self.layers, strict=True):
            x = layer(x, c, at_block, at_context, masks[kind])
        return self.norm(x).unflatten(1, (A, R))
