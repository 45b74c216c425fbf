"""How much of a trace of chats the prefix cache finds in pools of several sizes, beside the best that is possible.

The trace is a file of requests in the order of their arrival, each the token ids of its prompt and of its answer;
`--record` writes one of made-up chats: a few system prompts, some far more popular than others, and users who come back
turn after turn, or do not. The cache is the scheduler's own ledger, with a full group and a sliding one. Beside it is
Belady's rule, which knows all that will be asked for: on the full group alone (nobody's pages serve more), and on the
sliding group alone, of which a request needs the last window before the place where it parts from what was before.

    PYTHONPATH=benchmarks:workers:kernels python -m prefix_cache.hit_rate --record --trace FILE --output FILE
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.scheduling.page_ledger import PageLedger

PAGE = 16
WINDOW = 512
SHARES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
"""Sizes of the full group's pool, as parts of all different blocks of the trace."""
LONGEST = 4096


@dataclass(frozen=True)
class Request:
    """One turn: what was asked, and what was answered."""

    prompt: list[int]
    answer: list[int]


def record(num_chats: int, seed: int) -> Iterator[Request]:
    """Chats side by side: in each moment somebody new comes, or one of the recent ones goes on."""
    rng = random.Random(seed)
    systems = [_ids(rng, rng.randrange(64, 1024)) for _ in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]  # the first is asked for most, as by Zipf's law
    open_chats: list[list[int]] = []
    started = 0
    while started < num_chats or open_chats:
        if started < num_chats and (not open_chats or rng.random() < 0.35):
            open_chats.append([*rng.choices(systems, weights)[0]])
            started += 1
        chat = open_chats[-1 - min(int(rng.expovariate(0.25)), len(open_chats) - 1)]
        prompt = [*chat, *_ids(rng, int(rng.lognormvariate(4.0, 0.9)) + 1)]
        answer = _ids(rng, int(rng.lognormvariate(4.5, 0.8)) + 1)
        yield Request(prompt, answer)
        chat[:] = [*prompt, *answer]
        if rng.random() < 0.3 or len(chat) > LONGEST - 1024:
            open_chats = [other for other in open_chats if other is not chat]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1 << 18) for _ in range(min(count, 768))]


def found_by_cache(trace: Sequence[Request], num_pages: int, num_sliding: int) -> int:
    """Prompt tokens that the ledger's cache has, requests one after the other."""
    specs = [
        KVGroupSpec("sliding", (0,), 1, 1, PAGE, WINDOW, torch.float32),
        KVGroupSpec("full", (1,), 1, 1, PAGE, None, torch.float32),
    ]
    ledger = PageLedger(specs, {"sliding": num_sliding, "full": num_pages}, prefix_cache=True)
    found = 0
    for request in trace:
        text = [*request.prompt, *request.answer]
        hit = ledger.find(request.prompt, "", len(request.prompt) - 1)
        found += hit.num_tokens
        ledger.open(0, "", hit)
        computed = hit.num_tokens
        while computed < len(text) - 1:
            chunk = 256 if computed < len(request.prompt) else 1
            end = min(computed + chunk, len(text) - 1)
            reached = ledger.grow(0, end)
            assert reached == end, "one request fits alone"
            computed = end
            ledger.publish(0, text, computed)
            ledger.release_out_of_window(0, computed)
        ledger.close(0)
    return found


def found_at_best(trace: Sequence[Request], num_pages: int) -> int:
    """Prompt tokens that anybody could have with so many pages: the block whose next use is farthest off gives way, and
    need not be kept at all."""
    requests = [list(_blocks([*r.prompt, *r.answer])) for r in trace]
    uses: dict[int, list[int]] = {}
    for time, blocks in enumerate(requests):
        for block in blocks:
            uses.setdefault(block, []).append(time)
    for times in uses.values():
        times.reverse()
    kept: dict[int, float] = {}  # by block, when it is used next
    found = 0
    for request, blocks in zip(trace, requests, strict=True):
        usable = (len(request.prompt) - 1) // PAGE
        num_found = next((i for i, block in enumerate(blocks[:usable]) if block not in kept), min(usable, len(blocks)))
        found += num_found * PAGE
        for block in blocks:
            times = uses[block]
            times.pop()
            kept[block] = times[-1] if times else math.inf
        for block in sorted(kept, key=lambda block: kept[block], reverse=True):
            if len(kept) <= num_pages and kept[block] < math.inf:
                break
            del kept[block]
    return found


def found_with_best_windows(trace: Sequence[Request], num_sliding: int) -> int:
    """Prompt tokens found with so many sliding pages, all full ones there are, and the sliding page that is needed
    again last giving way; pages that nobody will need are not kept at all."""
    window = WINDOW // PAGE
    parted: list[tuple[list[int], int]] = []
    known: set[int] = set()
    for request in trace:
        blocks = list(_blocks([*request.prompt, *request.answer]))
        usable = blocks[: (len(request.prompt) - 1) // PAGE]
        parted.append((blocks, next((i for i, block in enumerate(usable) if block not in known), len(usable))))
        known.update(blocks)
    needs: dict[int, list[int]] = {}
    for time, (blocks, length) in reversed(list(enumerate(parted))):
        for block in blocks[max(0, length - window) : length]:
            needs.setdefault(block, []).append(time)
    kept: dict[int, int] = {}  # by block, when it is needed next
    found = 0
    for time, (blocks, length) in enumerate(parted):
        served = num_present = 0
        for end, block in enumerate(blocks[:length], 1):
            num_present = num_present + 1 if block in kept else 0
            served = end if num_present >= min(end, window) else served
        found += served * PAGE
        for block in blocks:
            times = needs.get(block, [])
            while times and times[-1] <= time:
                times.pop()
            if times:
                kept[block] = times[-1]
            else:
                kept.pop(block, None)
        for block in sorted(kept, key=lambda block: kept[block])[num_sliding:]:
            del kept[block]
    return found


def _blocks(text: Sequence[int]) -> Iterator[int]:
    """A number for each whole page of a text, the same for equal beginnings alone."""
    key = 0
    for end in range(PAGE, len(text), PAGE):
        key = hash((key, tuple(text[end - PAGE : end])))
        yield key


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--record", action="store_true", help="write the trace first")
    parser.add_argument("--chats", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.record:
        requests = record(arguments.chats, arguments.seed)
        arguments.trace.write_text("".join(json.dumps([r.prompt, r.answer]) + "\n" for r in requests))
    trace = [Request(*json.loads(line)) for line in arguments.trace.read_text().splitlines()]
    asked = sum(len(request.prompt) for request in trace)
    working_set = len({block for request in trace for block in _blocks([*request.prompt, *request.answer])})
    largest = max(-(-(len(r.prompt) + len(r.answer)) // PAGE) for r in trace)
    window_pages = -(-(WINDOW + 256) // PAGE) + 1
    lines = [
        f"{len(trace)} requests, {asked} prompt tokens, {working_set} different blocks of {PAGE} tokens; the longest "
        f"request takes {largest} pages, a window {window_pages}.",
        "",
        "| full pages, of all blocks | sliding: as many | Belady, full | sliding: 4 windows | Belady, 4 windows |",
        "| --- | --- | --- | --- | --- |",
    ]
    best_of_windows = found_with_best_windows(trace, 4 * window_pages)
    for share in SHARES:
        num_pages = max(int(share * working_set), largest)
        best_of_full = found_at_best(trace, num_pages)
        found = [
            found_by_cache(trace, num_pages, num_pages + window_pages),
            best_of_full,
            found_by_cache(trace, num_pages, 4 * window_pages),
            min(best_of_full, best_of_windows),
        ]
        rates = [count / asked for count in found]
        lines.append(f"| {num_pages} ({share:.0%}) | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |")
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
