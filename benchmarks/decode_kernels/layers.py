"""Whole models cut to a few layers: with the library's products, with streamed ones, with early starts."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode_kernels.measure import DEVICE, Report, early, error, median_us, random
from gemray_kernels.table import REFERENCE, Kernels, triton_kernels
from gemray_kernels.triton.activation import gelu_tanh_and_mul
from gemray_kernels.triton.paged_attention import paged_attention
from gemray_workers.checkpoint.random_weights import random_weights
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from support.oracles.paged import PagedCache, Rows

CONFIGS = Path(__file__).parents[1] / "configs"


class Switch:
    """A table of kernels that can be exchanged under a model that has been built."""

    def __init__(self, kernels: Kernels) -> None:
        """Begin with `kernels`."""
        self.kernels = kernels

    def __getattr__(self, name: str) -> Any:
        """The kernel of that name, looked up when it is called; what is no kernel is that of the first table."""
        found = getattr(self.kernels, name)
        return partial(self._call, name) if callable(found) else found

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.kernels, name)(*arguments)


def library_products() -> Kernels:
    """Our kernels but for the linear layers, which are cuBLAS's."""
    return replace(
        triton_kernels(),
        linear=REFERENCE.linear,
        summands=REFERENCE.summands,
        wide_summands=REFERENCE.wide_summands,
        gelu_linear=lambda x, w: gelu_tanh_and_mul(torch.nn.functional.linear(x, w)),
    )


def layers(report: Report) -> None:
    """Time and compare forward passes of three models."""
    for name, num_layers in (("31B-it", 12), ("26B-A4B-it", 12), ("E4B-it", 42)):
        config = ModelConfig.from_directory(CONFIGS / name)
        config = replace(config, layers=config.layers[:num_layers])
        switch = Switch(library_products())
        with mock.patch("gemray_workers.model.weight_sharding.kernels_for", lambda device, dtype, to=switch: to):
            model = TargetModel(
                config, SoloCommunicator(), dtype=torch.bfloat16, device=DEVICE, attention=paged_attention
            )
        random_weights("", model.weight_targets(), prefix="", is_ignored=lambda name: False)
        for batch, rows in ((1, 1), (8, 1), (1, 5), (8, 5)):
            measure(report, f"layers {name} ({num_layers}), {batch} x {rows}", model, config, switch, batch, rows)
        del model
        torch.cuda.empty_cache()


def measure(
    report: Report, name: str, model: TargetModel, config: ModelConfig, switch: Switch, batch: int, rows: int
) -> None:
    """Time one batch with each table of kernels; their outputs may differ by rounding."""
    cache = PagedCache(config, num_sequences=batch, max_len=2048, dtype=torch.bfloat16, page_size=16, device=DEVICE)
    for spec in cache.caches._readers.values():
        spec.k_pages.copy_(random(*spec.k_pages.shape))
        spec.v_pages.copy_(random(*spec.v_pages.shape))
    sets = [
        cache.batch([Rows(s, torch.randint(0, 262144, (rows,)).tolist(), 640) for s in range(batch)]) for _ in range(2)
    ]
    variants = {"library products": library_products(), "streamed products": triton_kernels()}
    found: dict[str, float] = {}
    outputs: dict[str, Tensor] = {}
    for products, table in variants.items():
        for label, on in ((products, False), (f"{products}, early", True)):
            switch.kernels = table
            try:
                with early(on):
                    outputs[label] = model.forward(sets[0], cache.caches).hidden_UH.double()
                    found[label] = median_us([partial(model.forward, b, cache.caches) for b in sets])
            except Exception:
                report.fault(f"{name} {label}: {traceback.format_exc()[-1500:]}")
                torch.cuda.synchronize()
                continue
            wrong = error(outputs[label], outputs.get("library products", outputs[label]))
            if not wrong < 0.1:
                report.fault(f"{name} {label}: differs by {wrong}")
    text = ", ".join(f"{k} {v:.0f}" for k, v in found.items())
    report.row("layers", f"{name}: {text}", name=name, batch=batch, rows=rows, found=found)
