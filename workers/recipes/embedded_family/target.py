"""The target as one fast whole-sequence forward, with the parameter names transformers' Gemma 4 has.

Formulas: spec section 1. tests/workers/test_embedded_family.py compares it with the transformers classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .blocks import (
    GeGLU,
    GemmaNorm,
    full_attention,
    proportional_frequencies,
    rope_table,
    rotate,
    sliding_attention,
    sliding_frequencies,
    unit,
)
from .settings import VOCAB, TargetSizes

Table = tuple[Tensor, Tensor]


@dataclass
class Trace:
    """What a pass leaves for the drafters."""

    hidden_BTH: Tensor  # after the final norm
    blocks: list[Tensor]  # output of every block, after layer_scalar
    donors: dict[str, tuple[Tensor, Tensor]]  # layer type -> (K after RoPE, V), [B, T, K, D]


class Attention(nn.Module):
    """One attention of either type; an assistant's has no K and V of its own."""

    def __init__(self, sizes: TargetSizes, full: bool, hidden: int, owns_kv: bool = True) -> None:
        super().__init__()
        self.full, self.window = full, sizes.sliding_window
        self.heads = sizes.num_attention_heads
        self.dim = sizes.global_head_dim if full else sizes.head_dim
        self.kv_heads = sizes.num_global_key_value_heads if full else sizes.num_key_value_heads
        self.eps = sizes.rms_norm_eps
        scale = self.dim**-0.25  # attention has no 1/sqrt(d): the norms' weights carry it
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.q_norm = GemmaNorm(self.dim, self.eps, scale)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        if owns_kv:
            self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
            self.k_norm = GemmaNorm(self.dim, self.eps, scale)
            if not full:
                self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)

    def queries(self, x: Tensor, table: Table) -> Tensor:
        """[B, T, H] -> rotated queries [B, T, N, D]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))), table)

    def keys_values(self, x: Tensor, table: Table) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> what the KV cache holds, each [B, T, K, D]; V reuses the raw keys on full layers."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = k if self.full else self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(self.k_norm(k), table), unit(v.float(), self.eps).to(v.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, strict: bool = False) -> Tensor:
        """[B, T, N, D] queries over a whole sequence's keys -> [B, T, H]."""
        mixed = full_attention(q, k, v, strict) if self.full else sliding_attention(q, k, v, self.window, strict)
        return self.o_proj(mixed.flatten(2))


class Layer(nn.Module):
    """Sandwich norms around attention and MLP, then layer_scalar over the whole stream (spec section 1.3)."""

    def __init__(self, sizes: TargetSizes, full: bool, hidden: int, inner: int, owns_kv: bool = True) -> None:
        super().__init__()
        eps, branch = sizes.rms_norm_eps, 0.3
        self.self_attn = Attention(sizes, full, hidden, owns_kv)
        self.mlp = GeGLU(hidden, inner)
        self.input_layernorm = GemmaNorm(hidden, eps)
        self.post_attention_layernorm = GemmaNorm(hidden, eps, branch)
        self.pre_feedforward_layernorm = GemmaNorm(hidden, eps)
        self.post_feedforward_layernorm = GemmaNorm(hidden, eps, branch)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the layer, [B, T, H] -> [B, T, H]."""
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)

    def forward(self, x: Tensor, table: Table) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[B, T, H] -> the next stream and this layer's keys and values."""
        h = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(h, table)
        x = x + self.post_attention_layernorm(self.self_attn.attend(self.self_attn.queries(h, table), k, v))
        return self.feed_forward(x), (k, v)

    def query_only(self, x: Tensor, table: Table, kv: tuple[Tensor, Tensor]) -> Tensor:
        """An assistant's layer over the donor's keys: position C sees 0..C-1 (spec section 4.4)."""
        q = self.self_attn.queries(self.input_layernorm(x), table)
        x = x + self.post_attention_layernorm(self.self_attn.attend(q, *kv, strict=True))
        return self.feed_forward(x)


class Decoder(nn.Module):
    """Embedding, layers and final norm under the names of `model.*`."""

    def __init__(self, sizes: TargetSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(VOCAB, sizes.hidden_size)
        self.layers = nn.ModuleList(
            Layer(sizes, kind == "full_attention", sizes.hidden_size, sizes.intermediate_size)
            for kind in sizes.layer_types()
        )
        self.norm = GemmaNorm(sizes.hidden_size, sizes.rms_norm_eps)


class Target(nn.Module):
    """gemray-tiny."""

    def __init__(self, sizes: TargetSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Decoder(sizes)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.04)
        self.register_buffer("freq_sliding", sliding_frequencies(sizes.head_dim, 1e4), persistent=False)
        self.register_buffer("freq_full", proportional_frequencies(sizes.global_head_dim, 1e6), persistent=False)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Scaled embeddings; the scale sqrt(H) = 16 is exact in every dtype."""
        return self.model.embed_tokens(ids).to(dtype) * self.sizes.hidden_size**0.5

    def tables(self, positions: Tensor) -> dict[bool, Table]:
        """RoPE tables by 'is a full layer'."""
        return {False: rope_table(self.freq_sliding, positions), True: rope_table(self.freq_full, positions)}

    def forward(self, ids_BT: Tensor, dtype: torch.dtype = torch.bfloat16) -> Trace:
        """A whole-sequence pass from position 0."""
        tables = self.tables(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        x, blocks, donors = self.embed(ids_BT, dtype), [], {}
        for layer in self.model.layers:
            full = layer.self_attn.full
            x, kv = layer(x, tables[full])
            blocks.append(x)
            donors["full_attention" if full else "sliding_attention"] = kv  # the last of each type stays
        return Trace(self.model.norm(x), blocks, donors)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> soft-capped logits in fp32."""
        cap = self.sizes.final_logit_softcapping
        return cap * torch.tanh(
            nn.functional.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float() / cap
        )
