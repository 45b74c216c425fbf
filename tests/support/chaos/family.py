"""What is served under chaos, what is asked of it, and what the answers must be: the embedded family in float64."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.requests import RequestReader
from gemray_workers.config import EngineConfig
from gemray_workers.embedded import EmbeddedName
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from support.engine.embedded_devices import TARGET, family_config
from support.engine.engine_runner import serve

DRAFTER: EmbeddedName = "gemray-tiny-assistant"
DRAFT_TOKENS = 4
SLOTS = 32
"""Requests that a gang runs at a time."""
_PROMPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "embedded_family" / "held_out_prompts.json"


def served_config(ranks: int) -> EngineConfig:
    """One gang of the family with its MTP assistant."""
    return family_config(
        DRAFTER,
        "cpu",
        "float64",
        tensor_parallel_size=ranks,
        num_draft_tokens=DRAFT_TOKENS,
        collective_timeout_s=300.0,
    )


def requests(count: int, max_tokens: int) -> list[pb.GenerateStreamRequest]:
    """Streams over held-out prompts of every kind, half of them greedy; none ends before its length."""
    prompts = json.loads(_PROMPTS.read_text())
    return [
        pb.GenerateStreamRequest(
            request_id=f"chaos-{index}",
            token_ids=pb.TokenIds(ids=prompt["ids"][-128:]),
            sampling=pb.SamplingParameters(
                seed=index, temperature=float(index % 2), max_tokens=max_tokens, ignore_eos=True
            ),
        )
        for index, prompt in enumerate(prompts[:: len(prompts) // count][:count])
    ]


def answers_alone(asked: list[pb.GenerateStreamRequest]) -> dict[str, list[int]]:
    """The ids of each request, by one rank without a drafter that nothing happens to."""
    torch.set_num_threads(1)
    rank = EngineRank(family_config(None, "cpu", "float64"), SoloCommunicator(), torch.device("cpu"))
    reader = RequestReader.from_directory(str(TARGET))
    submits = [reader.read(request, request.request_id, rank.model_info()).submit for request in asked]
    run = serve(rank, SoloCommunicator(), submits)
    assert run is not None
    return run.ids
