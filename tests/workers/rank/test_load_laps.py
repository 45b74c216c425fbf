"""A rank tells what each part of its load took, and all parts add up to the whole."""

from __future__ import annotations

import torch

from gemray_workers.engine.graphs import Captures
from gemray_workers.execution.compiled_programs import CompiledPrograms
from gemray_workers.rank.load_laps import LoadLaps
from gemray_workers.rank.process import ProcessLocation, RankSetup
from gemray_workers.rank.worker import RankWorker
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config


def test_compiling_and_capturing_are_taken_out_of_the_laps() -> None:
    clock = iter([100.0, 102.0, 110.0, 111.0])
    programs, captures = CompiledPrograms(), Captures()
    laps = LoadLaps(programs, lambda: captures, lambda: next(clock))
    laps.end("weights", within={"layout": 0.5})
    programs.compiled_ahead(3, 5.0)
    captures.seconds = 2.0
    laps.end("rehearsal")
    laps.end("weights")
    expected = {"weights": 2.5, "layout": 0.5, "rehearsal": 1.0, "compiling": 5.0, "graphs": 2.0}
    assert laps.seconds == expected
    assert list(laps.seconds) == list(expected)


def test_a_rank_tells_what_its_load_took() -> None:
    config = engine_config(tiny_checkpoint("31B"), kv_memory_bytes=None)
    worker = RankWorker(config, 0, lambda _config: ProcessLocation("here", "127.0.0.1", gpu=None))
    setup = RankSetup(
        rendezvous="none is needed", interface_ip="127.0.0.1", threads=torch.get_num_threads(), ranks_here=1
    )
    try:
        _, info = worker.load(setup)
    finally:
        worker.close()
    assert info.load_seconds.keys() >= {"peers", "weights", "layout", "rehearsal", "KV memory", "warm-up"}
    assert min(info.load_seconds.values()) >= 0
    assert info.load_seconds["warm-up"] > 0
