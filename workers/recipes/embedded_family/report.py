"""Logs of a run as CSV files and one picture, and the samples as text.

    python -m embedded_family.report --out OUT --ngram OUT/ngram.json --report benchmarks/embedded_family

Needs matplotlib, which nothing else of gemray does.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

LOGS = {"target": "loss", "mtp": "agree1", "dflash": "length", "dflash_further": "length", "centroids": "inside"}
SAMPLES_OF_A_KIND = 2


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """One line a log entry."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(logs: dict[str, list[dict[str, Any]]], ngram: dict[str, float], path: Path) -> None:
    """Target loss beside the drafters' agreement while training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 5, figsize=(21, 3.6), layout="constrained")
    titles = (
        "target: nats per token",
        "MTP: agreement by step",
        "DFlash: accepted length",
        "DFlash further: accepted length",
        "centroids: target inside",
    )
    for axis, (name, column), title in zip(axes, LOGS.items(), titles, strict=True):
        columns = [f"agree{i}" for i in range(1, 5)] if name == "mtp" else [column]
        for key in columns:
            axis.plot([r["step"] for r in logs[name]], [r[key] for r in logs[name]], lw=0.8, label=key)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    for kind, nats in ngram.items():
        axes[0].axhline(nats, ls=":", lw=0.8, color="grey")
        axes[0].text(0, nats, f"5-gram, held-out {kind}", fontsize=7)
    axes[0].set_ylim(0.8, 5)
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def write_samples(samples: list[dict[str, Any]], tokenizer: Tokenizer, path: Path) -> None:
    """The first continuations of every kind and form."""
    shown: Counter[tuple[str, str]] = Counter()
    parts = [
        "# Greedy continuations of held-out prompts\n\nThe first two of every kind and form in the evaluation's order,"
        " unselected. The target's text follows the rule.\n"
    ]
    for sample in samples:
        kind = sample["kind"], sample["form"]
        shown[kind] += 1
        if shown[kind] <= SAMPLES_OF_A_KIND:
            ids, start = sample["ids"], sample["start"]
            before, after = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:start], ids[start:]))
            parts.append(f"\n## {kind[0]}, {kind[1]}\n\n~~~text\n{before}\n-------- gemray-tiny:\n{after}\n~~~\n")
    path.write_text("".join(parts))


def main() -> None:
    """Write everything a reader of the run wants to see."""
    args = argparse.ArgumentParser(description=__doc__)
    for name in ("--out", "--ngram", "--report"):
        args.add_argument(name, type=Path, required=True)
    opts = args.parse_args()
    opts.report.mkdir(parents=True, exist_ok=True)
    logs = {name: json.loads((opts.out / f"{name}.json").read_text())["log"] for name in LOGS}
    for name, rows in logs.items():
        write_csv(rows, opts.report / f"{name}.csv")
    ngram = json.loads(opts.ngram.read_text())["held_out_nats"]
    draw(logs, ngram, opts.report / "training.png")
    target = json.loads((opts.out / "target.json").read_text())
    losses = {"target": target["held_out_nats"], "5-gram": ngram, "tokens": target["tokens"]}
    tokenizer = Tokenizer.from_file(str(opts.out / "gemray-tiny" / "tokenizer.json"))
    write_samples(json.loads((opts.out / "samples.json").read_text()), tokenizer, opts.report / "samples.md")
    shutil.copy(opts.out / "evaluation.json", opts.report / "evaluation.json")
    (opts.report / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
