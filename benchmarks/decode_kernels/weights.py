"""Weight shapes of the published models, and the tiles that are tried for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemray_kernels.triton.linear import LinearTile


@dataclass(frozen=True)
class Weight:
    """A matrix of a published model."""

    model: str
    name: str
    num_out: int
    num_in: int
    kind: str = "summands"
    """summands: the reader adds up parts; whole; gelu, silu: gate and up rows; wide: float32 results."""

    @property
    def bytes(self) -> int:
        """In bfloat16."""
        return self.num_out * self.num_in * 2


WEIGHTS = [
    Weight("31B", "qkv sliding", 16384, 5376),
    Weight("31B", "qkv full", 18432, 5376),
    Weight("31B", "o sliding", 5376, 8192),
    Weight("31B", "o full", 5376, 16384),
    Weight("31B", "gate_up", 43008, 5376, "gelu"),
    Weight("31B", "down", 5376, 21504),
    Weight("26B-A4B", "qkv sliding", 8192, 2816),
    Weight("26B-A4B", "qkv full", 9216, 2816),
    Weight("26B-A4B", "o sliding", 2816, 4096),
    Weight("26B-A4B", "o full", 2816, 8192),
    Weight("26B-A4B", "gate_up", 4224, 2816, "gelu"),
    Weight("26B-A4B", "down", 2816, 2112),
    Weight("26B-A4B", "router", 128, 2816, "wide"),
    Weight("E4B", "qkv sliding", 3072, 2560),
    Weight("E4B", "q sliding", 2048, 2560),
    Weight("E4B", "qkv full", 6144, 2560),
    Weight("E4B", "q full", 4096, 2560),
    Weight("E4B", "o sliding", 2560, 2048),
    Weight("E4B", "o full", 2560, 4096),
    Weight("E4B", "gate_up", 20480, 2560, "gelu"),
    Weight("E4B", "down", 2560, 10240),
    Weight("E4B", "layer gate", 256, 2560),
    Weight("E4B", "layer projection", 2560, 256),
    Weight("E4B", "model projection", 10752, 2560, "whole"),
    Weight("E2B", "qkv sliding", 2560, 1536),
    Weight("E2B", "q sliding", 2048, 1536),
    Weight("E2B", "qkv full", 5120, 1536),
    Weight("E2B", "q full", 4096, 1536),
    Weight("E2B", "o sliding", 1536, 2048),
    Weight("E2B", "o full", 1536, 4096),
    Weight("E2B", "gate_up", 12288, 1536, "gelu"),
    Weight("E2B", "gate_up wide", 24576, 1536, "gelu"),
    Weight("E2B", "down", 1536, 6144),
    Weight("E2B", "down wide", 1536, 12288),
    Weight("E2B", "layer gate", 256, 1536),
    Weight("E2B", "layer projection", 1536, 256),
    Weight("E2B", "model projection", 8960, 1536, "whole"),
    Weight("31B MTP", "q sliding", 8192, 1024),
    Weight("31B MTP", "q full", 16384, 1024),
    Weight("31B MTP", "o sliding", 1024, 8192),
    Weight("31B MTP", "o full", 1024, 16384),
    Weight("31B MTP", "gate_up", 16384, 1024, "gelu"),
    Weight("31B MTP", "down", 1024, 8192),
    Weight("31B MTP", "pre", 1024, 10752, "summands"),
    Weight("31B MTP", "post", 5376, 1024, "whole"),
    Weight("26B MTP", "q sliding", 4096, 1024),
    Weight("26B MTP", "o sliding", 1024, 4096),
    Weight("26B MTP", "pre", 1024, 5632, "summands"),
    Weight("26B MTP", "post", 2816, 1024, "whole"),
    Weight("E4B MTP", "q full", 2048, 256),
    Weight("E4B MTP", "o full", 256, 2048),
    Weight("E4B MTP", "gate_up", 4096, 256, "gelu"),
    Weight("31B DFlash", "fc", 5376, 32256, "summands"),
    Weight("31B DFlash", "qkv", 10240, 5376),
    Weight("31B DFlash", "kv", 2048, 5376),
    Weight("31B DFlash", "gate_up", 21504, 5376, "silu"),
    Weight("31B DFlash", "down", 5376, 10752),
    Weight("26B DFlash", "fc", 2816, 16896, "summands"),
    Weight("26B DFlash", "qkv", 6144, 2816),
    Weight("26B DFlash", "kv", 2048, 2816),
    Weight("26B DFlash", "gate_up", 11264, 2816, "silu"),
    Weight("26B DFlash", "down", 2816, 5632),
    Weight("31B", "head", 262144, 5376, "wide"),
    Weight("26B-A4B", "head", 262144, 2816, "wide"),
    Weight("MTP", "head", 262144, 1024, "wide"),
]

TILES = [
    LinearTile(64, 128, 4, 3),
    LinearTile(64, 128, 4, 5),
    LinearTile(64, 128, 4, 7),
    LinearTile(64, 256, 4, 3),
    LinearTile(64, 64, 4, 8),
    LinearTile(128, 64, 4, 6),
    LinearTile(128, 128, 4, 4),
    LinearTile(128, 128, 8, 4),
    LinearTile(128, 64, 8, 6),
    LinearTile(64, 128, 4, 5, weight_first=False),
    LinearTile(32, 128, 4, 6, weight_first=False),
    LinearTile(32, 256, 4, 4, weight_first=False),
    LinearTile(16, 256, 4, 5, weight_first=False),
    LinearTile(16, 512, 4, 3, weight_first=False),
]
GATED_TILES = [
    LinearTile(64, 128, 4, 3),
    LinearTile(64, 64, 4, 4),
    LinearTile(64, 64, 4, 6),
    LinearTile(64, 128, 8, 4),
    LinearTile(128, 64, 4, 4),
    LinearTile(128, 64, 8, 4),
    LinearTile(64, 128, 4, 3, weight_first=False),
    LinearTile(32, 128, 4, 4, weight_first=False),
    LinearTile(32, 256, 4, 3, weight_first=False),
    LinearTile(16, 256, 4, 4, weight_first=False),
    LinearTile(16, 512, 4, 2, weight_first=False),
]
HEAD_TILES = [
    LinearTile(64, 128, 4, 5),
    LinearTile(128, 64, 4, 6),
    LinearTile(128, 128, 4, 4),
    LinearTile(128, 128, 8, 4),
]


def candidates(weight: Weight) -> Iterator[LinearTile]:
    """Tiles to try for a weight."""
    if weight.kind in ("gelu", "silu"):
        yield from GATED_TILES
        return
    if weight.num_out >= 1 << 18:
        yield from HEAD_TILES
        return
    for tile in TILES:
        programs = -(-weight.num_out // tile.outputs)
        splits = {1}
        if weight.kind != "whole":
            splits |= {round(target / programs) for target in (132, 264, 396, 528)}
        for split in sorted(splits):
            fits = 1 <= split <= 16 and weight.num_in // max(split, 1) >= 2 * tile.inputs
            if split == 1 or (fits and programs * split <= 1100):
                yield replace(tile, splits=split)
