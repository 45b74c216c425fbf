"""Stage 6: train the block drafter by masked-block denoising on the target's continuations.

    python -m embedded_family.train_dflash --data DATA --out OUT --seconds 170

Every sequence gets ANCHORS random anchors among the target's own tokens. Row r of a block (anchor + 15 masks) learns
the target's choice for position anchor + r; early rows weigh more, since a wrong row ends the accepted run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from .compiled import speed_up
from .dflash import DFlash
from .export import load_target, save_dflash
from .muon import Optimizer
from .schedule import Continuations, rate
from .settings import FAMILY, SEED
from .target import Target

ANCHORS = 48
ROW_DECAY = 0.85


def pick_anchors(own: Tensor, rows: int) -> Tensor:
    """[B, T] 'own token' -> [B, ANCHORS] sorted anchors whose whole block fits in the sequence."""
    T = own.shape[1]
    weight = torch.where(own, 1.0, 0.02)
    weight[:, 0], weight[:, T - rows :] = 0, 0
    return torch.multinomial(weight, ANCHORS).sort(1).values


def head_loss(target: Target, y: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted hard + soft cross-entropy, agreement) of masked rows [B, A, R-1, H] against teacher logits."""
    logits = target.logits(y)
    log_p, log_q = teacher.log_softmax(-1), logits.log_softmax(-1)
    labels = teacher.argmax(-1)
    hard = -log_q.gather(-1, labels[..., None])[..., 0]
    soft = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = ((0.5 * hard + 0.5 * soft) * weight).sum() / weight.sum()
    return loss, (logits.argmax(-1) == labels).detach()


def block_loss(dflash: DFlash, target: Target, ids: Tensor, own: Tensor, head: object) -> tuple[Tensor, Tensor]:
    """(loss, mean accepted drafts + 1) of one batch."""
    R = dflash.sizes.block_size
    anchors = pick_anchors(own, R)
    with torch.no_grad():
        trace = target(ids)
        rows = anchors[..., None] + torch.arange(R - 1, device=ids.device)  # row r is chosen by hidden row C + r - 1
        B = torch.arange(len(ids), device=ids.device)[:, None, None]
        teacher = target.logits(trace.hidden_BTH[B, rows])
        mine = own[B, rows + 1]
        # Past the end of the target's own run the block's tokens are another prompt's: not to be learned.
        mine = mine.int().cummin(-1).values.bool()
    y = dflash(target, ids, trace, anchors)[:, :, 1:]
    weight = ROW_DECAY ** torch.arange(R - 1, device=ids.device) * mine
    loss, right = head(target, y, teacher, weight)  # type: ignore[operator]
    accepted = (right & mine).int().cumprod(-1).sum(-1).float()
    return loss, 1 + accepted.mean()


def main() -> None:
    """Train, log, export."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--steps", type=int, default=6000)
    args.add_argument("--seconds", type=float, default=170)
    args.add_argument("--batch", type=int, default=32)
    args.add_argument("--width", type=int, default=512)
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED + 3)
    target = load_target(opts.out / "gemray-tiny", torch.bfloat16, device)
    dflash = DFlash(FAMILY.dflash, FAMILY.target).to(device)
    batches = Continuations(opts.data / "continuations.npz", device, SEED + 3, split=opts.width)
    optimizer = Optimizer(dflash, lr_matrix=0.02, lr_rest=0.003)
    head = head_loss
    if speed_up(device):
        head = torch.compile(head_loss)
    log, started, progress = [], time.time(), 0.0
    for step in range(opts.steps):
        ids, own = batches.draw(opts.batch, opts.width)
        with torch.autocast(device.type, torch.bfloat16):
            loss, length = block_loss(dflash, target, ids, own, head)
        loss.backward()
        optimizer.step(rate(step, progress), momentum=min(0.95, 0.85 + step * 5e-4))
        progress = max((step + 1) / opts.steps, (time.time() - started) / opts.seconds)
        if step % 20 == 0 or progress >= 1:
            seconds = round(time.time() - started, 1)
            entry = {"step": step, "seconds": seconds, "loss": round(loss.item(), 4), "length": round(length.item(), 3)}
            log.append(entry)
            if step % 400 == 0 or progress >= 1:
                print(log[-1], flush=True)
        if progress >= 1:
            break
    save_dflash(dflash, opts.out / "gemray-tiny-dflash")
    (opts.out / "dflash.json").write_text(json.dumps({"seconds": time.time() - started, "log": log}))


if __name__ == "__main__":
    main()
