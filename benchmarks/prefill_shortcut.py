"""What it saves that prompt rows end at the last layer that owns KV: time to the first token with and without.

Models in the layers of E2B, E4B and 31B, in the sizes of the embedded family, with random weights: hidden size 256,
heads of 32 and 64, 4,096 ids. One engine in this process, on a CPU, one request at a time, no prefix cache. Times are
of the process's CPU from the engine's taking the request to its first token; it has one thread. Both ways take turns,
prompt by prompt, so that a machine that others use slows both.

    PYTHONPATH=benchmarks:workers:kernels python -m prefill_shortcut --output FILE
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from gemray_workers.config import EngineConfig
from gemray_workers.execution.cycle_rows import CycleRows
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.params import SamplingParams
from prefix_cache.first_token import TimedInbox

CONFIGS = Path(__file__).parent / "configs"
MODELS = ("E2B-it", "E4B-it", "31B-it")
LENGTHS = (64, 256, 1024)
SIZES = {
    "hidden_size": 256,
    "head_dim": 32,
    "global_head_dim": 64,
    "intermediate_size": 512,
    "sliding_window": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length (default 5)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    lines = [
        f"float32, {platform.machine()} CPU, one thread, torch {torch.__version__}, {arguments.repeats} prompts a row",
        "",
        "| layers of | prompt | every row in every layer, ms | rows with a use, ms | of it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for model in arguments.models:
        for row in rows(model, arguments.repeats):
            lines.append(row)
            print(row, flush=True)
            arguments.output.write_text("\n".join(lines) + "\n")


def rows(model: str, repeats: int) -> Iterator[str]:
    """A row of the table for each length of prompt."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_config(model, Path(directory))
        config = EngineConfig(
            model_path=directory,
            tensor_parallel_size=1,
            dtype="float32",
            device="cpu",
            kv_memory_bytes=1 << 30,
            random_weights=True,
            prefix_cache=False,
        )
        rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    rng = random.Random(0)
    for length in LENGTHS:
        whole, narrow = [], []
        for _ in range(1 + repeats):  # the first of each warms up
            ids = [rng.randrange(3, SIZES["vocab_size"]) for _ in range(length)]
            with mock.patch.object(CycleRows, "batch", CycleRows.all_rows):
                whole.append(first_token_ms(rank, ids))
            narrow.append(first_token_ms(rank, ids))
        ratio = statistics.median(narrow[1:]) / statistics.median(whole[1:])
        yield f"| {model.removesuffix('-it')} | {length} | {_spread(whole[1:])} | {_spread(narrow[1:])} | {ratio:.0%} |"


def write_config(model: str, directory: Path) -> None:
    """The published config with small widths and as many layers, of the same types."""
    config = json.loads((CONFIGS / model / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    text.update(SIZES)
    if text["hidden_size_per_layer_input"]:
        text.update(hidden_size_per_layer_input=32, vocab_size_per_layer_input=SIZES["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def first_token_ms(rank: EngineRank, prompt_ids: list[int]) -> float:
    """CPU time from taking a request to its first token."""
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=2)
    inbox = TimedInbox([Submit(request_id="r", prompt_ids=prompt_ids, params=params)])
    rank.engine(inbox).run()
    return 1000 * inbox.first_token["r"]


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"


if __name__ == "__main__":
    main()
