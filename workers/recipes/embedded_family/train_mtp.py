"""Stage 4: train the MTP assistant on the target's hidden states, KV and continuations.

    python -m embedded_family.train_mtp --data DATA --out OUT --seconds 150

Draft step i at anchor C is fed the sequence's own token C+i-1 and its own carried state, and learns the target's
choice after that prefix: greedy decoding accepts step i only when steps 1..i-1 were right, so this is exact there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .assistant import Assistant, ahead, first_state
from .compiled import speed_up
from .export import load_target, save_assistant
from .muon import Optimizer
from .schedule import Continuations, rate
from .settings import FAMILY, SEED
from .target import Target

Teach = Callable[[Target, Tensor], tuple[Tensor, Tensor]]
Match = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
STEPS = 4
STEP_DECAY = 0.85
PROMPT_WEIGHT = 0.2
START_WEIGHT = 3.0
"""Weight of anchors where a round of drafting would begin, beside 1 for the others: those after a draft that was wrong.
Hard places come in runs, so that rounds begin where the next token is hard as well."""


def teach(target: Target, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The target's log-probabilities and choices after every row."""
    logits = target.logits(hidden)
    return logits.log_softmax(-1), logits.argmax(-1)


def match(logits: Tensor, goal: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted mean of half cross-entropy with the target's choice and half KL from its law, where they agree)."""
    log_q = logits.log_softmax(-1)
    hard = -log_q.gather(-1, labels[..., None])[..., 0]
    soft = (goal.exp() * (goal - log_q)).sum(-1)
    return ((0.5 * hard + 0.5 * soft) * weight).sum() / weight.sum(), (logits.argmax(-1) == labels).detach()


@torch.no_grad()
def begins(logits: Tensor, labels: Tensor) -> Tensor:
    """Weights [B, T]: START_WEIGHT at anchors whose own token the anchor before would have drafted wrongly."""
    wrong = logits.argmax(-1) != labels
    return torch.where(ahead(wrong, -1), START_WEIGHT, 1.0)


def draft_loss(
    assistant: Assistant, target: Target, ids: Tensor, own: Tensor, teach: Teach = teach, match: Match = match
) -> tuple[Tensor, Tensor]:
    """(loss, per-step agreement with the target's argmax) of a [B, T] batch; `own` marks the target's own tokens."""
    with torch.no_grad():
        trace = target(ids)
        log_p, best = teach(target, trace.hidden_BTH)
    T = ids.shape[1]
    place = torch.arange(T, device=ids.device)
    carried, losses, rates = first_state(trace), [], []
    # Row t of `after` tells whether the target's choice at row t is its own token t+1 rather than a prompt's.
    after = ahead(own, 1)
    for i in range(STEPS):
        y, carried = assistant.step(target, ahead(ids, i), carried, trace)
        logits, labels = assistant.logits(y), ahead(best, i)
        if i == 0:
            emphasis = begins(logits, labels)
        valid = (place >= 1) & (place + i < T - 1)
        weight = valid * (PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * ahead(after, i).float())
        loss, right = match(logits, ahead(log_p, i), labels, weight * emphasis)
        losses.append(STEP_DECAY**i * loss)
        counted = valid & ahead(after, i)
        rates.append((right & counted).sum() / counted.sum().clamp_min(1))
    return torch.stack(losses).sum(), torch.stack(rates).detach()


def main() -> None:
    """Train, log, export."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--steps", type=int, default=4000)
    args.add_argument("--seconds", type=float, default=150)
    args.add_argument("--batch", type=int, default=16)
    args.add_argument("--width", type=int, default=1024)
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED + 1)
    target = load_target(opts.out / "gemray-tiny", torch.bfloat16, device)
    assistant = Assistant(FAMILY.assistant, FAMILY.target).to(device)
    assistant.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight.float())
    batches = Continuations(opts.data / "continuations.npz", device, SEED + 1)
    optimizer = Optimizer(assistant, lr_matrix=0.02, lr_rest=0.003)
    taught, matched = teach, match
    if speed_up(device):
        taught, matched = torch.compile(teach), torch.compile(match)
    log, started, progress = [], time.time(), 0.0
    for step in range(opts.steps):
        ids, own = batches.draw(opts.batch, opts.width)
        with torch.autocast(device.type, torch.bfloat16):
            loss, rates = draft_loss(assistant, target, ids, own, taught, matched)
        loss.backward()
        optimizer.step(rate(step, progress), momentum=min(0.95, 0.85 + step * 5e-4))
        progress = max((step + 1) / opts.steps, (time.time() - started) / opts.seconds)
        if step % 20 == 0 or progress >= 1:
            log.append(
                {"step": step, "seconds": round(time.time() - started, 1), "loss": round(loss.item(), 4)}
                | {f"agree{i + 1}": round(r, 4) for i, r in enumerate(rates.tolist())}
            )
            if step % 400 == 0 or progress >= 1:
                print(log[-1], flush=True)
        if progress >= 1:
            break
    save_assistant(assistant, opts.out / "gemray-tiny-assistant", ordered=False)
    (opts.out / "mtp.json").write_text(json.dumps({"seconds": time.time() - started, "log": log}))


if __name__ == "__main__":
    main()
