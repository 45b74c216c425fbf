"""Stages 2-7 in one process on one GPU, each until its deadline, so that the whole fits a fixed time.

    python -m embedded_family.run_all --data DATA --work WORK --keep KEEP

DATA has train.npz, held.npz, prompts.json and the tokenizer's files. Weights, logs and reports end in KEEP, copied
after every stage. Deadlines are seconds since the start; the last stage runs to its end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import time
import traceback
from importlib import import_module
from pathlib import Path

STAGES = (
    ("train_target", 255, ["--steps", "1000000"]),
    ("continuations", 303, ["--batches", "100"]),
    ("train_mtp", 405, ["--steps", "1000000"]),
    ("train_centroids", 417, ["--steps", "1000000"]),
    ("train_dflash", 560, ["--steps", "1000000"]),
    ("evaluate", 0, []),
)
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
    args.add_argument("--skip", nargs="*", default=[], help="stages whose results WORK already has")
    args.add_argument("--weights", nargs=4, default=[], help="passed on to train_target")
    args.add_argument("--scale", type=float, default=1.0, help="factor on all deadlines")
    opts = args.parse_args()
    started = time.time()
    data, out = opts.work / "data", opts.work / "out"
    (out / "gemray-tiny").mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    for name in ("train.npz", "held.npz", "reserve.npz", "prompts.json"):
        if name != "reserve.npz" or (opts.data / name).exists():
            shutil.copy(opts.data / name, data / name)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(opts.data / name, out / "gemray-tiny" / name)
    for stage, deadline, extra in STAGES:
        if stage in opts.skip:
            continue
        begun = time.time()
        sys.argv = [stage, "--data", str(data), "--out", str(out), *extra]
        if stage == "train_target" and opts.weights:
            sys.argv += ["--weights", *opts.weights]
        if deadline:
            sys.argv += ["--seconds", str(max(5.0, deadline * opts.scale - (begun - started)))]
        try:
            import_module(f"embedded_family.{stage}").main()
        except Exception:
            traceback.print_exc()
        print(f"== {stage}: {time.time() - begun:.0f} s, {time.time() - started:.0f} s in all", flush=True)
        preserve(out, opts.keep)


if __name__ == "__main__":
    main()
