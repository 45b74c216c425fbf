"""Stage 2: train the target on the corpus.

    python -m embedded_family.train_target --data DATA --out OUT --steps 4500 --seconds 300

The rate follows whichever of steps or seconds is further on, so a slower device ends in time with a finished decay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .compiled import speed_up
from .corpus import KINDS, WEIGHTS, Streams
from .export import save_target
from .muon import Optimizer
from .schedule import rate
from .settings import FAMILY, SEED
from .target import Target

Head = Callable[[Target, Tensor, Tensor], Tensor]
WIDTH = FAMILY.target.max_position_embeddings


def cross_entropy(target: Target, hidden: Tensor, labels: Tensor) -> Tensor:
    """Mean nats of [B, T] labels after [B, T, H] final states."""
    return functional.cross_entropy(target.logits(hidden).flatten(0, 1), labels.flatten())


def next_token_loss(target: Target, rows: Tensor, head: Head = cross_entropy) -> Tensor:
    """Mean cross-entropy of a [B, T + 1] batch."""
    return head(target, target(rows[:, :-1]).hidden_BTH, rows[:, 1:])


@torch.no_grad()
def held_out(target: Target, path: Path, device: torch.device, rows: int) -> dict[str, float]:
    """Mean nats per token of every kind, rows of the full width."""
    streams = Streams(path, device, SEED)
    result = {}
    for kind, start, length in zip(KINDS, streams.starts.tolist(), streams.lengths.tolist(), strict=True):
        ids, total, count = streams.ids[start : start + length].long(), 0.0, 0
        for at in range(0, min(length - 1, rows * WIDTH), WIDTH):
            row = ids[at : at + WIDTH + 1][None]
            total += float(next_token_loss(target, row)) * (row.shape[1] - 1)
            count += row.shape[1] - 1
        result[kind] = total / count
    return result


def main() -> None:
    """Train, log, export."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--steps", type=int, default=4500)
    args.add_argument("--seconds", type=float, default=300)
    args.add_argument("--batch", type=int, default=32)
    args.add_argument("--width", type=int, default=WIDTH)
    args.add_argument("--held-rows", type=int, default=1000, help="rows of each kind in the held-out loss")
    args.add_argument("--weights", type=float, nargs=len(KINDS), default=WEIGHTS, help=f"shares of {', '.join(KINDS)}")
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    target = Target(FAMILY.target).to(device)
    streams = Streams(opts.data / "train.npz", device, SEED, opts.weights)
    optimizer = Optimizer(target, lr_matrix=0.02, lr_rest=0.004)
    # Autocast keeps fp32 master weights and runs every product in bf16.
    head = cross_entropy
    if speed_up(device):
        head = torch.compile(cross_entropy)
    log, started, progress = [], time.time(), 0.0
    for step in range(opts.steps):
        with torch.autocast(device.type, torch.bfloat16):
            loss = next_token_loss(target, streams.rows(opts.batch, opts.width + 1), head)
        loss.backward()
        optimizer.step(rate(step, progress), momentum=min(0.95, 0.85 + step * 3e-4))
        progress = max((step + 1) / opts.steps, (time.time() - started) / opts.seconds)
        if step % 20 == 0 or progress >= 1:
            log.append({"step": step, "seconds": round(time.time() - started, 1), "loss": round(loss.item(), 4)})
            if step % 400 == 0:
                print(log[-1], flush=True)
        if progress >= 1:
            break
    save_target(target, opts.out / "gemray-tiny")
    target.load_state_dict({k: v.bfloat16().float() for k, v in target.state_dict().items()})
    torch.compiler.set_stance("force_eager")  # odd widths at the end of a stream
    with torch.autocast(device.type, torch.bfloat16):
        losses = held_out(target, opts.data / "held.npz", device, opts.held_rows)
    tokens = (log[-1]["step"] + 1) * opts.batch * opts.width
    report = {"held_out_nats": losses, "tokens": tokens, "seconds": time.time() - started, "log": log}
    (opts.out / "target.json").write_text(json.dumps(report))
    print({k: v for k, v in report.items() if k != "log"}, flush=True)


if __name__ == "__main__":
    main()
