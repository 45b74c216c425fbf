"""The MTP assistant (spec section 4) over whole sequences: every position is an anchor C at once.

Anchor C has token b = ids[C] and the target's hidden row C-1, sees donor keys 0..C-1 and stays at position C for the
whole burst, so one draft step for all anchors is one strictly causal pass over the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .blocks import GemmaNorm
from .settings import VOCAB, AssistantSizes, TargetSizes
from .target import Layer, Target, Trace


class AssistantDecoder(nn.Module):
    """`model.*` of the assistant: its own embedding, which is its head, Q-only layers and norm."""

    def __init__(self, sizes: AssistantSizes, target: TargetSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, sizes.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.04)
        self.layers = nn.ModuleList(
            Layer(target, kind == "full_attention", sizes.hidden_size, sizes.intermediate_size, owns_kv=False)
            for kind in sizes.layer_types
        )
        self.norm = GemmaNorm(sizes.hidden_size, target.rms_norm_eps)


class CentroidHead(nn.Module):
    """`masked_embedding.*`: clusters of equal size over the vocabulary (spec section 4.5)."""

    def __init__(self, sizes: AssistantSizes) -> None:
        super().__init__()
        self.clusters, self.top = sizes.num_centroids, sizes.centroid_intermediate_top_k
        self.centroids = nn.Linear(sizes.hidden_size, sizes.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(VOCAB))

    def candidates(self, y: Tensor) -> Tensor:
        """[..., Hd] -> the ids of the chosen clusters, [..., top * VOCAB / clusters]."""
        chosen = self.centroids(y).topk(self.top, dim=-1).indices
        return self.token_ordering.view(self.clusters, -1)[chosen].flatten(-2)


class Assistant(nn.Module):
    """Four layers over the target's KV; `ordered` adds the centroid head."""

    def __init__(self, sizes: AssistantSizes, target: TargetSizes, ordered: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.pre_projection = nn.Linear(2 * target.hidden_size, sizes.hidden_size, bias=False)
        self.post_projection = nn.Linear(sizes.hidden_size, target.hidden_size, bias=False)
        self.model = AssistantDecoder(sizes, target)
        if ordered:
            self.masked_embedding = CentroidHead(sizes)

    def step(self, target: Target, tokens: Tensor, carried: Tensor, trace: Trace) -> tuple[Tensor, Tensor]:
        """One draft step at all anchors: ([B, T] tokens, [B, T, H] carried state) -> (y [B, T, Hd], next state)."""
        T = tokens.shape[1]
        tables = target.tables(torch.arange(T, device=tokens.device))
        z = self.pre_projection(torch.cat([target.embed(tokens, carried.dtype), carried], -1))
        for kind, layer in zip(self.sizes.layer_types, self.model.layers, strict=True):
            z = layer.query_only(z, tables[layer.self_attn.full], trace.donors[kind])
        y = self.model.norm(z)
        return y, self.post_projection(y)

    def logits(self, y: Tensor) -> Tensor:
        """[..., Hd] -> uncapped logits over the whole vocabulary, fp32."""
        return nn.functional.linear(y, self.model.embed_tokens.weight.to(y.dtype)).float()

    def choose(self, y: Tensor) -> Tensor:
        """The drafted token of each row: argmax over the vocabulary or the chosen clusters, smallest id on ties."""
        logits = self.logits(y)
        if hasattr(self, "masked_embedding"):
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, self.masked_embedding.candidates(y), True)
            logits = logits.masked_fill(~seen, float("-inf"))
        return logits.argmax(-1)


def first_state(trace: Trace) -> Tensor:
    """Row C of the result is hidden row C-1; anchor 0 has none and gets zeros."""
    return torch.cat([torch.zeros_like(trace.hidden_BTH[:, :1]), trace.hidden_BTH[:, :-1]], 1)


def ahead(x: Tensor, steps: int) -> Tensor:
    """Row C of the result is row C + steps along axis 1; the tail wraps and must be masked by the caller."""
    return torch.roll(x, -steps, 1)
