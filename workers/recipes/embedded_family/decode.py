"""Batched decoding with KV caches of fixed shape, replayed as one CUDA graph where there is CUDA.

Every row feeds its own queue of prompts, one token a step for all rows: forced tokens while inside a prompt, the
model's own after it, the next prompt after a stop token or `limit` tokens. Positions are equal in all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .settings import STOP_IDS
from .target import Target


class Decoder:
    """Decodes `rows` sequences of `length` tokens from a [P, longest] table of prompts."""

    def __init__(self, target: Target, rows: int, length: int, dtype: torch.dtype) -> None:
        self.target, self.rows, self.length, self.dtype = target, rows, length, dtype
        self.device = target.model.embed_tokens.weight.device
        s = target.sizes
        self.tables = target.tables(torch.arange(length, device=self.device))
        self.caches = []
        for layer in target.model.layers:
            a = layer.self_attn
            depth = length if a.full else s.sliding_window  # a sliding cache is a ring of W keys
            shape = (2, rows, a.kv_heads, depth, a.dim)
            self.caches.append(torch.zeros(shape, dtype=dtype, device=self.device))
        self.stops = torch.tensor(STOP_IDS, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.out = torch.zeros(rows, length, dtype=torch.long, device=self.device)
        self.own = torch.zeros(rows, length, dtype=torch.bool, device=self.device)

    def load(self, prompts: Tensor, lengths: Tensor, temperature: Tensor, limit: int) -> None:
        """Row r takes prompts r, r + rows, ... in turn; `temperature` [rows], 0 is greedy."""
        self.prompts, self.lengths, self.temperature, self.limit = prompts, lengths, temperature, limit
        self.queue = torch.arange(self.rows, device=self.device)
        self.offset = torch.ones_like(self.queue)
        self.made = torch.zeros_like(self.queue)
        self.token = prompts[self.queue, 0].clone()
        self.is_own = torch.zeros(self.rows, dtype=torch.bool, device=self.device)
        self.sampled = bool((temperature > 0).any())
        self.steps = 0
        self.position.zero_()
        self.out.zero_()
        self.own.zero_()

    def _attend(self, index: int, x: Tensor) -> Tensor:
        layer = self.target.model.layers[index]
        a, cache = layer.self_attn, self.caches[index]
        cos, sin = (t.index_select(0, self.position) for t in self.tables[a.full])
        q = a.queries(x, (cos, sin))[:, 0]
        k, v = a.keys_values(x, (cos, sin))
        depth = cache.shape[3]
        slot = self.position % depth
        cache[0].index_copy_(2, slot, k.transpose(1, 2))
        cache[1].index_copy_(2, slot, v.transpose(1, 2))
        if self.device.type != "cuda":  # a graph needs one shape; without one, leave out what is still empty
            depth = min(depth, self.steps + 1)
        seen = torch.arange(depth, device=self.device) <= self.position
        q = q.unflatten(1, (a.kv_heads, -1))
        scores = (q @ cache[0, :, :, :depth].mT).float().masked_fill(~seen, float("-inf"))
        mixed = scores.softmax(-1).to(self.dtype) @ cache[1, :, :, :depth]
        return a.o_proj(mixed.reshape(x.shape[0], 1, -1))

    def step(self) -> None:
        """Feed the current tokens, choose the next ones."""
        self.out.index_copy_(1, self.position, self.token[:, None])
        self.own.index_copy_(1, self.position, self.is_own[:, None])
        x = self.target.embed(self.token[:, None], self.dtype)
        for i, layer in enumerate(self.target.model.layers):
            x = x + layer.post_attention_layernorm(self._attend(i, layer.input_layernorm(x)))
            x = layer.feed_forward(x)
        logits = self.target.logits(self.target.model.norm(x))[:, 0]
        chosen = self._sample(logits) if self.sampled else logits.argmax(-1)
        forced = self.offset < self.lengths[self.queue]
        made = torch.where(forced, 0, self.made + 1)
        ended = ~forced & (torch.isin(self.token, self.stops) & self.is_own | (made > self.limit))
        queue = torch.where(ended, (self.queue + self.rows) % len(self.prompts), self.queue)
        forced = forced | ended
        offset = torch.where(ended, 0, self.offset)
        known = self.prompts[queue, offset.clamp_max(self.prompts.shape[1] - 1)]
        self.token.copy_(torch.where(forced, known, chosen))
        self.is_own.copy_(~forced)
        self.offset.copy_(torch.where(forced, offset + 1, offset))
        self.made.copy_(torch.where(ended, 0, made))
        self.queue.copy_(queue)
        self.position.add_(1)
        self.steps += 1

    def _sample(self, logits: Tensor) -> Tensor:
        """Top-64 sampling by Gumbel noise at each row's temperature; 0 is greedy."""
        top, ids = logits.topk(64)
        noise = -torch.log(-torch.log(torch.rand_like(top).clamp(1e-9, 1 - 1e-7)))
        warm = self.temperature[:, None]
        choice = torch.where(warm > 0, top / warm.clamp_min(1e-3) + noise, top).argmax(-1, keepdim=True)
        return ids.gather(1, choice)[:, 0]

    @torch.no_grad()
    def run(self) -> tuple[Tensor, Tensor]:
        """(ids [rows, length], which of them the model chose itself)."""
        if self.device.type != "cuda":
            for _ in range(self.length):
                self.step()
        else:
            self._run_graph()
        return self.out, self.own

    def _run_graph(self) -> None:
        if not hasattr(self, "graph"):
            state = [self.queue, self.offset, self.made, self.token, self.is_own, self.position]
            saved = [t.clone() for t in state]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            for t, s in zip(state, saved, strict=True):
                t.copy_(s)
        for _ in range(self.length):
            self.graph.replay()
