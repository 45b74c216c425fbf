"""A DFlash drafter written from the formulas of spec section 5: whole tensors of one sequence, no pages, float64.

It shares nothing with the engine: it reads config.json and the tensors itself, and keeps no cache between rounds
unless `Context.append` is used, which is compared with starting from scratch.

Shape legend: C context rows, B block rows, F captured layers, H hidden size, N query heads, K KV heads, D head dim,
V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """Keys and values of the committed positions, by layer: lists of [C, K, D]."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def length(self) -> int:
        return len(self.keys[0])

    def append(self, other: Context) -> Context:
        """This context, then `other`'s rows."""
        return Context(
            [torch.cat(pair) for pair in zip(self.keys, other.keys, strict=True)],
            [torch.cat(pair) for pair in zip(self.values, other.values, strict=True)],
        )


class DFlashReference:
    """The drafter in `directory`, with the target's embedding table lent to it."""

    def __init__(
        self, directory: Path, table_VH: Tensor, *, input_scale: float | None = None, is_causal: bool | None = None
    ) -> None:
        """
        Args:
            directory: the checkpoint.
            table_VH: the target's raw embedding table.
            input_scale: multiplies the block's embeddings; None is sqrt(H).
            is_causal: of every layer; None is the rule by layer type.
        """
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self._weights = {name: w.double() for name, w in load_file(directory / "model.safetensors").items()}
        self._table_VH = table_VH.double()
        self._input_scale = self.config["hidden_size"] ** 0.5 if input_scale is None else input_scale
        self._is_causal = is_causal
        self.layer_ids: list[int] = self.config["dflash_config"]["target_layer_ids"]

    def context(self, features_CFH: Tensor, first_position: int = 0) -> Context:
        """K and V of every layer from the target's features; the rows stand at `first_position` and on."""
        context_CH = self._norm("hidden_norm", features_CFH.double().flatten(1) @ self._weights["fc.weight"].T)
        positions_C = torch.arange(first_position, first_position + len(features_CFH))
        layers = range(self.config["num_hidden_layers"])
        return Context(
            [self._keys(layer, context_CH, positions_C) for layer in layers],
            [self._heads(f"layers.{layer}.self_attn.v_proj", context_CH) for layer in layers],
        )

    def logits(self, context: Context, newest: int, num_drafts: int) -> Tensor:
        """Logits [num_drafts, V] of the masked rows of a block that begins with the token `newest`."""
        config, start = self.config, context.length
        tokens_B = torch.tensor([newest] + [config["dflash_config"]["mask_token_id"]] * num_drafts)
        positions_B = torch.arange(start, start + len(tokens_B))
        x_BH = self._table_VH[tokens_B] * self._input_scale
        for layer, kind in enumerate(config["layer_types"]):
            prefix = f"layers.{layer}"
            normed_BH = self._norm(f"{prefix}.input_layernorm", x_BH)
            queries_BND = self._queries(layer, normed_BH, positions_B)
            keys_LKD = torch.cat([context.keys[layer], self._keys(layer, normed_BH, positions_B)])
            values_LKD = torch.cat([context.values[layer], self._heads(f"{prefix}.self_attn.v_proj", normed_BH)])
            visible_BL = self._visible(kind, positions_B, len(keys_LKD))
            o_BH = self._attend(queries_BND, keys_LKD, values_LKD, visible_BL)
            x_BH = x_BH + o_BH @ self._weights[f"{prefix}.self_attn.o_proj.weight"].T
            m_BH = self._norm(f"{prefix}.post_attention_layernorm", x_BH)
            gate_BI, up_BI = (m_BH @ self._weights[f"{prefix}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x_BH = (
                x_BH + (torch.nn.functional.silu(gate_BI) * up_BI) @ self._weights[f"{prefix}.mlp.down_proj.weight"].T
            )
        scores_BV = self._norm("norm", x_BH)[1:] @ self._table_VH.T * config.get("output_multiplier", 1.0)
        cap = config["final_logit_softcapping"]
        return cap * torch.tanh(scores_BV / cap)

    def _visible(self, kind: str, positions_B: Tensor, num_keys: int) -> Tensor:
        """Which keys each block row sees. Keys stand at 0 to num_keys - 1, the block's own at the end."""
        query_B1, key_L = positions_B[:, None], torch.arange(num_keys)
        sliding = kind == "sliding_attention"
        visible_BL = torch.ones(len(positions_B), num_keys, dtype=torch.bool)
        if sliding if self._is_causal is None else self._is_causal:
            visible_BL &= key_L <= query_B1
        if sliding:
            visible_BL &= query_B1 - key_L < self.config["sliding_window"]
        return visible_BL

    def _attend(self, q_BND: Tensor, k_LKD: Tensor, v_LKD: Tensor, visible_BL: Tensor) -> Tensor:
        repeats = q_BND.shape[1] // k_LKD.shape[1]
        k_LND, v_LND = k_LKD.repeat_interleave(repeats, dim=1), v_LKD.repeat_interleave(repeats, dim=1)
        scores_NBL = torch.einsum("bnd,lnd->nbl", q_BND, k_LND) * self.config["head_dim"] ** -0.5
        weights_NBL = scores_NBL.masked_fill(~visible_BL, -torch.inf).softmax(-1)
        return torch.einsum("nbl,lnd->bnd", weights_NBL, v_LND).flatten(1)

    def _queries(self, layer: int, rows_BH: Tensor, positions_B: Tensor) -> Tensor:
        heads_BND = self._heads(f"layers.{layer}.self_attn.q_proj", rows_BH)
        return self._rope(self._norm(f"layers.{layer}.self_attn.q_norm", heads_BND), positions_B)

    def _keys(self, layer: int, rows_CH: Tensor, positions_C: Tensor) -> Tensor:
        heads_CKD = self._heads(f"layers.{layer}.self_attn.k_proj", rows_CH)
        return self._rope(self._norm(f"layers.{layer}.self_attn.k_norm", heads_CKD), positions_C)

    def _heads(self, name: str, rows_CH: Tensor) -> Tensor:
        return (rows_CH @ self._weights[f"{name}.weight"].T).view(len(rows_CH), -1, self.config["head_dim"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return self._weights[f"{name}.weight"] * (x / (mean_square + self.config["rms_norm_eps"]).sqrt())

    def _rope(self, x_CKD: Tensor, positions_C: Tensor) -> Tensor:
        """Pairs (m, m + D/2) turn by position * theta^(-2m/D); cos and sin are float32, as the spec has them."""
        half = x_CKD.shape[-1] // 2
        frequencies_m = 1.0 / self.config["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angles_C1m = (positions_C.float()[:, None] * frequencies_m)[:, None]
        cos, sin = angles_C1m.cos().double(), angles_C1m.sin().double()
        first, second = x_CKD[..., :half], x_CKD[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
