"""Stage 3: what the target itself writes, greedy and sampled, after training prompts.

python -m embedded_family.continuations --data DATA --out OUT --rows 4096 --batches 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from .corpus import chat_prompts, model_role, padded, text_prompts
from .decode import Decoder
from .export import load_target
from .settings import SEED

# The rest are chats, whose short answers are soon learned.
TEXT_SHARE = {"code": 0.28, "prose": 0.22, "greek": 0.20}
GREEDY_SHARE, LIMIT = 0.7, 160


def main() -> None:
    """Decode `batches` tables of `rows` rows and store ids and masks."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--rows", type=int, default=4096)
    args.add_argument("--batches", type=int, default=8)
    args.add_argument("--width", type=int, default=1024)
    args.add_argument("--seconds", type=float, default=60)
    opts = args.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED + 2)
    rng, started = np.random.default_rng(SEED + 2), time.time()
    reserve = opts.data / "reserve.npz"  # texts the target never saw, if make_data kept some back
    arrays = np.load(reserve if reserve.exists() else opts.data / "train.npz")
    chats = chat_prompts(arrays["chat"], model_role(opts.out / "gemray-tiny" / "tokenizer.json"), longest=256)
    target = load_target(opts.out / "gemray-tiny", torch.bfloat16, device)
    decoder = Decoder(target, opts.rows, opts.width, torch.bfloat16)
    temperature = torch.rand(opts.rows, device=device) * 0.6 + 0.5
    temperature[: int(GREEDY_SHARE * opts.rows)] = 0.0
    ids, own = [], []
    for batch in range(opts.batches):
        wanted = opts.rows * 8  # more than a row can use
        prompts = [chats[i] for i in rng.integers(0, len(chats), wanted - int(wanted * sum(TEXT_SHARE.values())))]
        for kind, share in TEXT_SHARE.items():
            prompts += text_prompts(arrays[kind], int(wanted * share), rng)
        order = rng.permutation(len(prompts))
        table, lengths = padded([prompts[i] for i in order], device)
        decoder.load(table, lengths, temperature, LIMIT)
        out, mine = decoder.run()
        ids.append(out.to(torch.int16).cpu().numpy().astype(np.uint16))
        own.append(mine.cpu().numpy())
        print(f"batch {batch}: own {own[-1].mean():.2f}, {time.time() - started:.1f}s", flush=True)
        spent = time.time() - started
        if spent + 0.9 * spent / (batch + 1) > opts.seconds:
            break
    np.savez(opts.data / "continuations.npz", ids=np.concatenate(ids), own=np.concatenate(own))
    report = {"tokens": int(sum(map(np.size, ids))), "own": float(np.mean([o.mean() for o in own]))}
    (opts.out / "continuations.json").write_text(json.dumps(report | {"seconds": time.time() - started}))


if __name__ == "__main__":
    main()
