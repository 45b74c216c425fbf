"""Stage 6: train the block drafter by masked-block denoising on the target's continuations.

    python -m embedded_family.train_dflash --data DATA --out OUT --seconds 170

Every sequence gets ANCHORS random anchors among the target's own tokens, more of them after tokens that were hard to
foresee, where rounds of drafting begin. Row r of a block (anchor + 15 masks) learns the target's choice for position
anchor + r; early rows weigh more, since a wrong row ends the accepted run.

With --resume the drafter of OUT is trained further, at a lower rate and on what its own runs come to: a row weighs
in full while all rows before it are right, and little after the first wrong one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .compiled import speed_up
from .dflash import DFlash
from .export import load_module, load_target, save_dflash
from .muon import Optimizer
from .schedule import Continuations, rate
from .settings import FAMILY, SEED
from .target import Target

ANCHORS = 48
ROW_DECAY = 0.85
HARD, HARD_WEIGHT = 0.7, 3.0
"""Anchors whose own token the target gave less than this chance are that much more likely."""
RESUMED_RATE = 0.4
LOST_WEIGHT = 0.1
"""Weight of rows after a wrong one, in a drafter trained further."""


def pick_anchors(own: Tensor, chance: Tensor, rows: int) -> Tensor:
    """[B, ANCHORS] sorted anchors whose whole block fits in the sequence.

    Args:
        own: [B, T], whether the target chose the token itself.
        chance: [B, T], the probability it gave the token.
        rows: of a block.
    """
    T = own.shape[1]
    weight = torch.where(own, 1.0, 0.02) * torch.where(chance < HARD, HARD_WEIGHT, 1.0)
    weight[:, 0], weight[:, T - rows :] = 0, 0
    return torch.multinomial(weight, ANCHORS).sort(1).values


def chances(target: Target, hidden: Tensor, ids: Tensor) -> Tensor:
    """[B, T]: the probability that the target gave each token after the ones before it; 1 for the first."""
    log_p = target.logits(hidden[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return functional.pad(log_p, (1, 0)).exp()


def head_loss(target: Target, y: Tensor, teacher: Tensor, weight: Tensor, lost: float) -> tuple[Tensor, Tensor]:
    """(weighted hard + soft cross-entropy, agreement) of masked rows [B, A, R-1, H] against teacher logits.

    Rows after a wrong one weigh `lost` times as much.
    """
    logits = target.logits(y)
    log_p, log_q = teacher.log_softmax(-1), logits.log_softmax(-1)
    labels = teacher.argmax(-1)
    right = (logits.argmax(-1) == labels).detach()
    reached = functional.pad(right.int().cumprod(-1)[..., :-1], (1, 0), value=1)
    weight = weight * (lost + (1 - lost) * reached)
    hard = -log_q.gather(-1, labels[..., None])[..., 0]
    soft = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = ((0.5 * hard + 0.5 * soft) * weight).sum() / weight.sum()
    return loss, right


def block_loss(
    dflash: DFlash, target: Target, ids: Tensor, own: Tensor, head: object, lost: float
) -> tuple[Tensor, Tensor]:
    """(loss, mean accepted drafts + 1) of one batch."""
    R = dflash.sizes.block_size
    with torch.no_grad():
        trace = target(ids)
        anchors = pick_anchors(own, chances(target, trace.hidden_BTH, ids), R)
        rows = anchors[..., None] + torch.arange(R - 1, device=ids.device)  # row r is chosen by hidden row C + r - 1
        B = torch.arange(len(ids), device=ids.device)[:, None, None]
        teacher = target.logits(trace.hidden_BTH[B, rows])
        mine = own[B, rows + 1]
        # Past the end of the target's own run the block's tokens are another prompt's: not to be learned.
        mine = mine.int().cummin(-1).values.bool()
    y = dflash(target, ids, trace, anchors)[:, :, 1:]
    weight = ROW_DECAY ** torch.arange(R - 1, device=ids.device) * mine
    loss, right = head(target, y, teacher, weight, lost)  # type: ignore[operator]
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
    args.add_argument("--resume", action="store_true", help="train the drafter in OUT further")
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED + 3)
    target = load_target(opts.out / "gemray-tiny", torch.bfloat16, device)
    dflash = DFlash(FAMILY.dflash, FAMILY.target).to(device)
    scale, lost, log_name = 1.0, 1.0, "dflash.json"
    if opts.resume:
        load_module(dflash, opts.out / "gemray-tiny-dflash", torch.float32, device)
        dflash.requires_grad_(True).train()
        scale, lost, log_name = RESUMED_RATE, LOST_WEIGHT, "dflash_further.json"
    batches = Continuations(opts.data / "continuations.npz", device, SEED + 3 + opts.resume, split=opts.width)
    optimizer = Optimizer(dflash, lr_matrix=0.02, lr_rest=0.003)
    head = head_loss
    if speed_up(device):
        head = torch.compile(head_loss)
    log, started, progress = [], time.time(), 0.0
    for step in range(opts.steps):
        ids, own = batches.draw(opts.batch, opts.width)
        with torch.autocast(device.type, torch.bfloat16):
            loss, length = block_loss(dflash, target, ids, own, head, lost)
        loss.backward()
        optimizer.step(scale * rate(step, progress), momentum=min(0.95, 0.85 + step * 5e-4))
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
    (opts.out / log_name).write_text(json.dumps({"seconds": time.time() - started, "log": log}))


if __name__ == "__main__":
    main()
