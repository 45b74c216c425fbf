"""Tables of `gemray info` lose nothing where they are narrow."""

from __future__ import annotations

import io

from rich.console import Console

from gemray.cli.info import _model
from gemray.v1 import generation_pb2 as pb


def test_a_checkpoints_hash_is_whole_at_80_columns() -> None:
    checkpoint_hash = "0123456789abcdef" * 4
    out = io.StringIO()
    Console(file=out, width=80).print(_model(pb.GetModelInfoResponse(checkpoint_hash=checkpoint_hash)))
    assert "…" not in out.getvalue()
    cells = [line.split("│")[2].strip() for line in out.getvalue().splitlines() if line.startswith("│")]
    assert checkpoint_hash in "".join(cells)
