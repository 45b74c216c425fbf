"""What a hit in the prefix cache saves: time to the first token of prompts that are computed, and of those found.

One engine of the embedded family in this process, on a CPU, one request at a time. A prompt of random ids is asked for
twice: nothing of it is there the first time, and all but its last page or less the second time. Times are from the
engine's taking the request to its first token, of the process's CPU: it has one thread, so on an idle machine a clock
shows the same, and on a busy one it does not count what others do. The table has medians, and least and most.

    PYTHONPATH=benchmarks:workers:kernels python -m prefix_cache.first_token --output FILE
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import override

from gemray_workers.config import EngineConfig
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import FromGang, StepOutput, Submit, ToGang
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.warm_up import OneByOne
from gemray_workers.sampling.params import SamplingParams

DRAFTERS: Mapping[str, EmbeddedName | None] = {
    "none": None,
    "mtp": "gemray-tiny-assistant",
    "dflash": "gemray-tiny-dflash",
}
LENGTHS = (100, 256, 512, 1024, 1536)
NUM_TOKENS = 4


class TimedInbox(OneByOne):
    """Notes when each request was handed over, and when its first token came."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        """
        Args:
            submits: in the order in which they are served, one after the other.
        """
        super().__init__(submits)
        self.begun: dict[str, float] = {}
        self.first_token: dict[str, float] = {}

    @override
    def poll(self, timeout_s: float) -> list[ToGang]:
        arrived = super().poll(timeout_s)
        self.begun |= {message.request_id: time.process_time() for message in arrived if isinstance(message, Submit)}
        return arrived

    @override
    def send(self, message: FromGang) -> None:
        now = time.process_time()
        if isinstance(message, StepOutput):
            for delta in message.deltas:
                if delta.token_ids:
                    self.first_token.setdefault(delta.request_id, now - self.begun[delta.request_id])
        super().send(message)


def rows(drafter: str, repeats: int) -> Iterator[str]:
    """A row of the table for each length of prompt."""
    name = DRAFTERS[drafter]
    config = EngineConfig(
        model_path=str(embedded_path("gemray-tiny")),
        tensor_parallel_size=1,
        dtype="float32",
        device="cpu",
        kv_memory_bytes=256 << 20,
        drafter_path=None if name is None else str(embedded_path(name)),
    )
    torch.set_num_threads(1)
    rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    rng = random.Random(0)
    for length in LENGTHS:
        submits = []
        for repeat in range(1 + repeats):  # the first pair warms up
            ids = [rng.randrange(3, 4096) for _ in range(length)]
            submits += [_request(f"{repeat} {kind}", ids) for kind in ("computed", "found")]
        inbox = TimedInbox(submits)
        rank.engine(inbox).run()
        times = {
            kind: [1000 * inbox.first_token[f"{repeat} {kind}"] for repeat in range(1, 1 + repeats)]
            for kind in ("computed", "found")
        }
        (cached,) = {inbox.last(f"{repeat} found").cached_tokens for repeat in range(1 + repeats)}
        computed, found = (statistics.median(times[kind]) for kind in ("computed", "found"))
        yield (
            f"| {drafter} | {length} | {cached} | {_spread(times['computed'])} | {_spread(times['found'])} | "
            f"{computed / found:.1f} |"
        )


def _request(request_id: str, prompt_ids: list[int]) -> Submit:
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=NUM_TOKENS)
    return Submit(request_id=request_id, prompt_ids=prompt_ids, params=params)


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length (default 5)")
    parser.add_argument("--drafters", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    lines = [
        f"gemray-tiny, float32, {platform.machine()} CPU, one thread, torch {torch.__version__}, "
        f"{arguments.repeats} prompts a row",
        "",
        "| drafter | prompt | found | computed, ms | found, ms | times faster |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for drafter in arguments.drafters:
        for row in rows(drafter, arguments.repeats):
            lines.append(row)
            arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
