"""Stage 1: corpus -> documents, chat turns, tokenizer, token files and held-out prompts.

    python -m embedded_family.make_data --site SITE --debian DEB --out OUT --tokenizer TOKENIZER

Writes OUT/train.npz and OUT/held.npz (uint16 streams by kind), OUT/prompts.json and OUT/counts.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import tokenizer as bpe
from .settings import SEED
from .sources import Document, collect, greek_messages
from .turns import Conversation, conversations, prompt, render

HELD_OUT = 0.03
PROMPT_TOKENS = 96


def side_of(key: str, reserve: float) -> str:
    """held, reserve or train, by a hash of the document's key, so that no document is on two sides."""
    place = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32
    if place < HELD_OUT:
        return "held"
    return "reserve" if place < HELD_OUT + reserve else "train"


def streams(groups: dict[str, list[str]], tok: Tokenizer) -> dict[str, np.ndarray]:
    """kind -> one uint16 stream of its documents, each beginning with <bos>."""
    out = {}
    for kind, texts in groups.items():
        ids: list[int] = []
        for start in range(0, len(texts), 512):
            for encoded in tok.encode_batch(texts[start : start + 512], add_special_tokens=False):
                ids.extend(encoded.ids)
        out[kind] = np.array(ids, dtype=np.uint16)
    return out


def held_prompts(raw: list[Document], chats: list[Conversation], tok: Tokenizer, rng: random.Random) -> list[dict]:
    """Held-out prompts: beginnings of documents and chat prompts, by kind."""
    out = []
    for kind in ("code", "prose", "greek"):
        pool = [d.text for d in raw if d.kind == kind]
        for _ in range(60):
            lines = rng.choice(pool).splitlines(keepends=True)
            start = rng.randrange(max(1, len(lines) - 30))  # any line with enough text after it
            ids = tok.encode("<bos>" + "".join(lines[start : start + 40]), add_special_tokens=False).ids
            if len(ids) > PROMPT_TOKENS + 64:
                out.append({"kind": kind, "form": "text", "ids": ids[:PROMPT_TOKENS]})
    by_category: dict[str, list[Conversation]] = defaultdict(list)
    for chat in chats:
        by_category[chat.category].append(chat)
    for category, pool in sorted(by_category.items()):
        for chat in rng.sample(pool, min(70, len(pool))):
            ids = tok.encode(prompt(chat.turns), add_special_tokens=False).ids
            if len(ids) <= 256:
                out.append({"kind": category, "form": "chat", "ids": ids})
    return out


def main() -> None:
    """Build everything from the two source folders."""
    args = argparse.ArgumentParser(description=__doc__)
    for name in ("--site", "--debian", "--out", "--tokenizer"):
        args.add_argument(name, type=Path, required=True)
    args.add_argument("--reserve", type=float, default=0.0, help="share kept from the target for drafters' prompts")
    opts = args.parse_args()
    rng, started = random.Random(SEED), time.time()

    documents = list(collect(opts.site, opts.debian))
    rng.shuffle(documents)
    chats = list(conversations(documents, greek_messages(opts.site), rng))
    rng.shuffle(chats)
    print(f"{len(documents)} documents, {len(chats)} conversations, {time.time() - started:.0f}s", flush=True)

    groups: dict[str, dict[str, list[str]]] = {side: defaultdict(list) for side in ("train", "held", "reserve")}
    for document in documents:
        groups[side_of(document.key, opts.reserve)][document.kind].append("<bos>" + document.text)
    # A made-up turn seen in training is no held-out turn, even under another key.
    seen = {render(chat.turns) for chat in chats if side_of(chat.key, opts.reserve) != "held"}
    held_chats = [c for c in chats if side_of(c.key, 0) == "held" and render(c.turns) not in seen]
    for chat in chats:
        side = side_of(chat.key, opts.reserve)
        if side != "held":
            groups[side]["chat"].append(render(chat.turns))
    groups["held"]["chat"] = [render(chat.turns) for chat in held_chats]

    sample = [text for kind in groups["train"].values() for text in kind[:: 1 if len(kind) < 500 else 3]]
    sample += groups["train"]["greek"]  # fewer characters than the others, with letters of its own
    tok = bpe.train(sample)
    bpe.save(tok, opts.tokenizer)
    print(f"tokenizer trained, {time.time() - started:.0f}s", flush=True)

    opts.out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name in ("train", "held") + (("reserve",) if opts.reserve else ()):
        arrays = streams(groups[name], tok)
        np.savez_compressed(opts.out / f"{name}.npz", **arrays)
        counts[name] = {
            kind: {"tokens": len(ids), "documents": len(groups[name][kind]), "chars": sum(map(len, groups[name][kind]))}
            for kind, ids in arrays.items()
        }
    held_raw = [d for d in documents if side_of(d.key, 0) == "held"]
    prompts = held_prompts(held_raw, held_chats, tok, rng)
    (opts.out / "prompts.json").write_text(json.dumps(prompts))
    (opts.out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts), f"{len(prompts)} prompts, {time.time() - started:.0f}s", flush=True)


if __name__ == "__main__":
    main()
