"""Stage 7: greedy acceptance of the drafters on held-out prompts, by plain teacher-forced code in fp32.

    python -m embedded_family.evaluate --data DATA --out OUT

The target's greedy continuation of every prompt is fixed first. A drafter then drafts from every position of it, and a
walk from the prompt's end replays the rounds of speculative decoding: accept the matching prefix, add one token, go on.
A round at the end of a text counts with the tokens that were left, so short answers lower the mean length.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .assistant import Assistant, first_state
from .corpus import padded
from .decode import Decoder
from .dflash import DFlash
from .export import load_module, load_target
from .settings import FAMILY, STOP_IDS
from .target import Target

LIMIT = {"chat": 200, "text": 128}
MTP_DRAFTS = 4


@dataclass
class Sample:
    """A prompt of `start` tokens and the target's greedy continuation ids[start:end]."""

    kind: str
    form: str
    ids: Tensor
    start: int
    end: int


@torch.no_grad()
def greedy(target: Target, prompts: list[dict[str, Any]], group: int = 64) -> list[Sample]:
    """The target's own greedy continuations, prompts of like length side by side; in the prompts' order."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]["ids"]))
    samples: dict[int, Sample] = {}
    for at in range(0, len(order), group):
        chosen = order[at : at + group]
        for i, sample in zip(chosen, greedy_group(target, [prompts[i] for i in chosen]), strict=True):
            samples[i] = sample
    return [samples[i] for i in range(len(prompts))]


def greedy_group(target: Target, prompts: list[dict[str, Any]]) -> list[Sample]:
    """One decoder's worth of `greedy`."""
    device = target.model.embed_tokens.weight.device
    table, lengths = padded([p["ids"] for p in prompts], device)
    longest = max(LIMIT[p["form"]] for p in prompts)
    decoder = Decoder(target, len(prompts), table.shape[1] + longest, torch.float32)
    decoder.load(table, lengths, torch.zeros(len(prompts), device=device), longest)
    out, _ = decoder.run()
    samples = []
    for row, prompt in zip(out, prompts, strict=True):
        start = len(prompt["ids"])
        end = start + LIMIT[prompt["form"]]
        stops = torch.isin(row[start:end], torch.tensor(STOP_IDS, device=device)).nonzero()
        end = start + int(stops[0]) + 1 if len(stops) else end
        samples.append(Sample(prompt["kind"], prompt["form"], row[:end].clone(), start, end))
    return samples


@torch.no_grad()
def mtp_drafts(target: Target, assistant: Assistant, ids_1T: Tensor) -> Tensor:
    """[1, T] -> [T, MTP_DRAFTS] drafts from every anchor, each step fed the step before."""
    trace = target(ids_1T, torch.float32)
    carried, tokens, drafts = first_state(trace), ids_1T, []
    for _ in range(MTP_DRAFTS):
        y, carried = assistant.step(target, tokens, carried, trace)
        tokens = assistant.choose(y)
        drafts.append(tokens[0])
    return torch.stack(drafts, -1)


@torch.no_grad()
def dflash_drafts(target: Target, dflash: DFlash, sample: Sample) -> Tensor:
    """[T, 15] drafts; only the anchors that the walk visits are filled, one block at a time."""
    ids = sample.ids[None]
    trace = target(ids, torch.float32)
    truth, width = sample.ids.tolist(), dflash.sizes.block_size - 1
    out = torch.zeros(len(truth), width, dtype=torch.long)
    at = sample.start
    while at < sample.end - 1:
        y = dflash(target, ids, trace, torch.tensor([[at]], device=ids.device))[0, 0, 1:]
        out[at] = target.logits(y).argmax(-1).cpu()
        at += 1 + accepted_prefix(out[at].tolist(), truth[at + 1 :])
    return out


def accepted_prefix(drafts: list[int], truth: list[int]) -> int:
    """How many drafts in a row equal what the target wrote."""
    n = 0
    while n < min(len(drafts), len(truth)) and drafts[n] == truth[n]:
        n += 1
    return n


def walk(sample: Sample, drafts: Tensor) -> tuple[list[int], list[tuple[int, int]]]:
    """(tokens emitted by each round, (accepted, checkable) drafts of each round)."""
    ids, rows = sample.ids.tolist(), drafts.tolist()
    at, emitted, accepted = sample.start, [], []
    while at < sample.end - 1:
        left = sample.end - 1 - at
        n = accepted_prefix(rows[at], ids[at + 1 :])
        emitted.append(min(n + 1, left))
        accepted.append((n, min(len(rows[at]), left)))
        at += n + 1
    return emitted, accepted


def summary(walks: list[tuple[list[int], list[tuple[int, int]]]], positions: int) -> dict[str, Any]:
    """Mean length over rounds; per position, the share of rounds that accepted so far among those that could."""
    emitted = [e for rounds, _ in walks for e in rounds]
    pairs = [p for _, accepted in walks for p in accepted]
    rates = []
    for i in range(1, positions + 1):
        able = [n for n, could in pairs if could >= i]
        rates.append(round(sum(n >= i for n in able) / max(1, len(able)), 3))
    mean = round(sum(emitted) / max(1, len(emitted)), 3)
    return {"prompts": len(walks), "rounds": len(emitted), "mean_length": mean, "rates": rates}


def table(samples: list[Sample], drafts: list[Tensor]) -> dict[str, Any]:
    """Summaries by kind, by form and over all prompts."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for sample, rows in zip(samples, drafts, strict=True):
        walked = walk(sample, rows)
        for group in ("all", sample.kind, f"{sample.kind}/{sample.form}"):
            groups[group].append(walked)
    return {name: summary(walks, drafts[0].shape[-1]) for name, walks in sorted(groups.items())}


def main() -> None:
    """Measure the three drafters and the turn ends."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--prompts", type=int, default=1000)
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.compiler.set_stance("force_eager")  # every prompt has its own length
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_target(opts.out / "gemray-tiny", torch.float32, device)
    prompts = json.loads((opts.data / "prompts.json").read_text())
    prompts = prompts[:: max(1, len(prompts) // opts.prompts)]
    samples = greedy(target, prompts)
    print(f"{len(samples)} continuations", flush=True)
    chats = [s for s in samples if s.form == "chat"]
    ended = sum(int(s.ids[-1]) in STOP_IDS for s in chats)
    report: dict[str, Any] = {"chats": len(chats), "chats_ended_within_200": ended}
    for name, ordered in (("gemray-tiny-assistant", False), ("gemray-tiny-assistant-centroid", True)):
        assistant = Assistant(FAMILY.assistant, FAMILY.target, ordered=ordered)
        load_module(assistant, opts.out / name, torch.float32, device)
        report[name] = table(samples, [mtp_drafts(target, assistant, s.ids[None]) for s in samples])
        print(name, report[name]["all"], flush=True)
    dflash = DFlash(FAMILY.dflash, FAMILY.target)
    load_module(dflash, opts.out / "gemray-tiny-dflash", torch.float32, device)
    report["gemray-tiny-dflash"] = table(samples, [dflash_drafts(target, dflash, s) for s in samples])
    texts = [{"kind": s.kind, "form": s.form, "start": s.start, "ids": s.ids.tolist()} for s in samples]
    (opts.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    (opts.out / "samples.json").write_text(json.dumps(texts))
    for name in ("gemray-tiny-assistant", "gemray-tiny-assistant-centroid", "gemray-tiny-dflash"):
        for group, row in report[name].items():
            print(name, group, row["prompts"], row["mean_length"], row["rates"][:4], flush=True)
    print(f"chats ended {ended} of {len(chats)}", flush=True)


if __name__ == "__main__":
    main()
