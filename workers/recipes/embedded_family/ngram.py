"""The 5-gram baseline: interpolated Kneser-Ney on the same tokens and the same held-out streams, in numpy.

    python -m embedded_family.ngram --data DATA --out OUT

Counts use 12 bits a token, so a 5-gram is one exact 60-bit key. R. Kneser and H. Ney 1995; one discount per order,
D = n1 / (n1 + 2 n2).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from .corpus import KINDS
from .settings import VOCAB

ORDER, BITS = 5, 12
Array = np.ndarray


def keys(ids: Array, order: int) -> Array:
    """Every `order`-gram of a stream as one integer, oldest token in the highest bits."""
    out = np.zeros(len(ids) - order + 1, dtype=np.int64)
    for i in range(order):
        out = (out << BITS) | ids[i : len(ids) - order + 1 + i].astype(np.int64)
    return out


class Level:
    """Counts of one order: of tokens at the top, of distinct left neighbours below."""

    def __init__(self, grams: Array, counts: Array) -> None:
        self.grams, self.counts = grams, counts.astype(np.float64)
        self.discount = (counts == 1).sum() / max(1, (counts == 1).sum() + 2 * (counts == 2).sum())
        self.contexts, first = np.unique(grams >> BITS, return_index=True)
        self.totals = np.add.reduceat(self.counts, first)
        self.kinds = np.diff(np.append(first, len(grams)))

    def probability(self, gram: Array, lower: Array) -> Array:
        """Discounted estimate with the left-over mass given to `lower`."""
        count = lookup(self.grams, self.counts, gram)
        total = lookup(self.contexts, self.totals, gram >> BITS)
        kinds = lookup(self.contexts, self.kinds, gram >> BITS)
        known = total > 0
        safe = np.where(known, total, 1)
        mixed = (np.maximum(count - self.discount, 0) + self.discount * kinds * lower) / safe
        return np.where(known, mixed, lower)


def lookup(sorted_keys: Array, values: Array, wanted: Array) -> Array:
    """Values of `wanted` keys, 0 where absent."""
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == wanted, values[at], 0)


def levels(ids: Array) -> list[Level]:
    """Orders 1 to ORDER."""
    grams, counts = np.unique(keys(ids, ORDER), return_counts=True)
    out = [Level(grams, counts)]
    for order in range(ORDER - 1, 0, -1):
        # A lower-order gram counts once for every distinct token seen before it.
        grams, counts = np.unique(grams & ((1 << BITS * order) - 1), return_counts=True)
        out.append(Level(grams, counts))
    return out[::-1]


def nats(model: list[Level], ids: Array) -> float:
    """Mean nats per token of a stream, from its fifth token on."""
    p = np.full(len(ids) - ORDER + 1, 1.0 / VOCAB)
    full = keys(ids, ORDER)
    for order, level in enumerate(model, 1):
        p = level.probability(full & ((1 << BITS * order) - 1), p)
    return float(-np.log(p).mean())


def main() -> None:
    """Count, evaluate, write OUT/ngram.json."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    opts = args.parse_args()
    started = time.time()
    train, held = np.load(opts.data / "train.npz"), np.load(opts.data / "held.npz")
    model = levels(np.concatenate([train[kind] for kind in KINDS]))
    report = {kind: nats(model, held[kind]) for kind in KINDS}
    opts.out.mkdir(parents=True, exist_ok=True)
    (opts.out / "ngram.json").write_text(json.dumps({"held_out_nats": report, "seconds": time.time() - started}))
    print(report, f"{time.time() - started:.0f}s")


if __name__ == "__main__":
    main()
