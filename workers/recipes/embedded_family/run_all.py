"""Stages 2-7 in one process on one GPU, each until its time is up, so that the whole fits a fixed time.

    python -m embedded_family.run_all --data DATA --work WORK --keep KEEP

DATA has train.npz, held.npz, prompts.json and the tokenizer's files. Weights, logs and reports end in KEEP, copied
after every stage. `--stages` runs some of them in a WORK that has what the ones before made: with two GPUs the two
drafters can be trained side by side.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """A script, how long it may take and what it is told."""

    module: str
    seconds: int
    """0: to its end."""
    options: tuple[str, ...] = ()


_ENDLESS = ("--steps", "1000000")
STAGES = {
    "train_target": Stage("train_target", 240, _ENDLESS),
    "continuations": Stage("continuations", 45, ("--batches", "100")),
    "train_mtp": Stage("train_mtp", 230, _ENDLESS),
    "train_centroids": Stage("train_centroids", 15, _ENDLESS),
    "train_dflash": Stage("train_dflash", 170, _ENDLESS),
    "train_dflash_further": Stage("train_dflash", 110, ("--resume", *_ENDLESS)),
    "evaluate": Stage("evaluate", 0),
}
MODELS = ("gemray-tiny", "gemray-tiny-assistant", "gemray-tiny-assistant-centroid", "gemray-tiny-dflash")


def preserve(out: Path, keep: Path) -> None:
    """Copy what there is: one weights file a model, everything else in one archive."""
    for model in MODELS:
        weights = out / model / "model.safetensors"
        if weights.exists():
            shutil.copy(weights, keep / f"{model}.safetensors")
    with tarfile.open(keep / "logs.tgz", "w:gz") as archive:
        for path in sorted(out.rglob("*.json")):
            archive.add(path, path.relative_to(out))


def main() -> None:
    """Run every stage, whatever became of the one before."""
    args = argparse.ArgumentParser(description=__doc__)
    for name in ("--data", "--work", "--keep"):
        args.add_argument(name, type=Path, required=True)
    args.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    args.add_argument("--scale", type=float, default=1.0, help="factor on all times")
    opts = args.parse_args()
    started = time.time()
    data, out = opts.work / "data", opts.work / "out"
    (out / "gemray-tiny").mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    for name in ("train.npz", "held.npz", "prompts.json"):
        shutil.copy(opts.data / name, data / name)
    if (opts.data / "reserve.npz").exists():
        shutil.copy(opts.data / "reserve.npz", data / "reserve.npz")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(opts.data / name, out / "gemray-tiny" / name)
    for name in opts.stages:
        stage, begun = STAGES[name], time.time()
        sys.argv = [name, "--data", str(data), "--out", str(out), *stage.options]
        if stage.seconds:
            sys.argv += ["--seconds", str(stage.seconds * opts.scale)]
        try:
            import_module(f"embedded_family.{stage.module}").main()
        except Exception:
            traceback.print_exc()
        print(f"== {name}: {time.time() - begun:.0f} s, {time.time() - started:.0f} s in all", flush=True)
        preserve(out, opts.keep)


if __name__ == "__main__":
    main()
