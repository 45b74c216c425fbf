"""``python -m support.cluster.shape_server --shape 31B --tp 2``: a published shape with random weights, served.

A gRPC server on loopback over ranks that are plain processes, without Ray, with the settings that `gemray serve` would
take. What it says means nothing, and a drafter is never right; what it costs is real. The tokenizer is a small one: ask
by token ids, as ``gemray bench --address`` does. ``--layers 4 --device cpu`` is for machines without a card.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.checkpoints.servable_checkpoint import GENERATION_CONFIG
from support.checkpoints.tiny_tokenizer import write_tiny_tokenizer
from support.cluster.process_server import serve
from support.engine.gpu import memory_config

TOKENIZER_IDS = 2048


def served_directory(shape_directory: Path, directory: Path) -> Path:
    """A directory that a server takes: the config of a shape, and a small tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape_directory / "config.json", directory / "config.json")
    write_tiny_tokenizer(directory, vocab_size=TOKENIZER_IDS)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG), encoding="utf-8")
    return directory


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="31B", help="of benchmarks/configs (default 31B)")
    parser.add_argument("--drafter", default="none", choices=("none", "mtp", "dflash"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers (default: all)")
    parser.add_argument("--prefill-chunk", type=int, help="as `gemray serve` has it (default: its default)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens of a request (default 8192)")
    parser.add_argument("--kv-memory", type=int, help="bytes of KV pages (default: what is free)")
    parser.add_argument("--port", type=int, default=50051)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    changes: dict[str, Any] = {
        "prefill_chunk": options.prefill_chunk,
        "kv_memory_bytes": options.kv_memory,
    }
    with tempfile.TemporaryDirectory() as scratch:
        config = memory_config(
            options.shape,
            options.drafter,
            Path(scratch) / "configs",
            options.layers,
            tensor_parallel_size=options.tp,
            device=options.device,
            max_model_len=options.max_model_len,
            **{name: value for name, value in changes.items() if value is not None},
        )
        directory = served_directory(Path(config.model_path), Path(scratch) / f"{options.shape}-it")
        return asyncio.run(serve(replace(config, model_path=str(directory)), port=options.port, max_rebuilds=0))


if __name__ == "__main__":
    sys.exit(main())
