"""Tables of `gemray info` lose nothing where they are narrow."""

from __future__ import annotations

import io

from rich.console import Console

from gemray.cli.info import _model, _replicas
from gemray.v1 import generation_pb2 as pb


def test_a_checkpoints_hash_is_whole_at_80_columns() -> None:
    checkpoint_hash = "0123456789abcdef" * 4
    out = io.StringIO()
    Console(file=out, width=80).print(_model(pb.GetModelInfoResponse(checkpoint_hash=checkpoint_hash)))
    assert "…" not in out.getvalue()
    cells = [line.split("│")[2].strip() for line in out.getvalue().splitlines() if line.startswith("│")]
    assert checkpoint_hash in "".join(cells)


def test_a_replicas_failure_is_its_first_line() -> None:
    failed = pb.ReplicaStats(failure="it was killed\nThe actor died because of:\n\tclass_name: RankWorker")
    out = io.StringIO()
    Console(file=out, width=120).print(
        _replicas(pb.GetModelInfoResponse(), pb.GetServerStatsResponse(replicas=[failed]))
    )
    assert "it was killed" in out.getvalue()
    assert "RankWorker" not in out.getvalue()
