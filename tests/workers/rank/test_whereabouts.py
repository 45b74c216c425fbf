"""What a rank says of itself when it is asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from gemray_workers.messages import ToGang
from gemray_workers.parallel.exchanges import Exchanges
from gemray_workers.rank.warm_up import OneByOne
from gemray_workers.rank.whereabouts import unfinished, whereabouts
from support.waiting import HANG_S

RECORDED: dict[str, Any] = {
    "version": "2.10",
    "entries": [
        {"pg_id": 0, "collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "input_sizes": [[8, 5376]],
         "state": "completed", "retired": True},
        {"pg_id": 0, "collective_seq_id": 8, "profiling_name": "nccl:all_reduce", "input_sizes": [[8, 5376]],
         "state": "started", "retired": False},
        {"pg_id": 1, "collective_seq_id": 3, "profiling_name": "nccl:send", "input_sizes": [[4]],
         "state": "scheduled", "retired": True},
        {"pg_id": 0, "collective_seq_id": 9, "profiling_name": "nccl:_all_gather_base", "input_sizes": [[8]],
         "state": "scheduled", "retired": False},
    ],
}  # fmt: skip
"""As torch's flight recorder has it: what has retired is no longer watched, whatever its state was last."""


def test_the_stack_of_another_thread_is_told_down_to_the_innermost_function() -> None:
    asked, may_go = threading.Event(), threading.Event()

    def submits() -> Any:
        asked.set()
        assert may_go.wait(HANG_S)
        yield from ()

    polled: list[list[ToGang]] = []
    waiting = threading.Thread(target=lambda: polled.append(OneByOne(submits()).poll(0.0)), name="a step")
    waiting.start()
    assert asked.wait(HANG_S)
    exchanges = [Exchanges(group="gang", begun=3, inside=None, seconds=0.0)]
    found = whereabouts(exchanges)
    may_go.set()
    waiting.join(HANG_S)
    assert found.at.startswith("gemray_workers.rank.warm_up.OneByOne.__init__:")
    assert found.exchanges == exchanges
    own = found.stacks.partition("a step:\n")[2]
    assert own.index("OneByOne.__init__:") < own.index(".submits:") < own.index("threading.Event.wait:")
    assert "whereabouts.whereabouts" not in found.stacks, "the thread that asks is left out"


def test_collectives_that_a_card_has_not_ended() -> None:
    assert unfinished(RECORDED) == "nccl:all_reduce number 8 of [[8, 5376]] is started, 1 more behind it"
    assert unfinished({"version": "2.10"}) == ""


def test_the_recorder_is_asked_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda includeCollectives: b'{"entries": []}', raising=False)
    assert whereabouts([]).device == ""
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda includeCollectives: b"no JSON", raising=False)
    assert whereabouts([]).device.startswith("torch's flight recorder cannot be read: ")
