"""A limit of open files under which Ray or the ranks would die of something else is told before anything starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gemray_cluster.check import open_files
from gemray_cluster.check.result import Status
from gemray_workers.errors import CapacityError
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.waiting import HANG_S


@pytest.mark.parametrize(
    ("limit", "status"), [(64, Status.FAIL), (511, Status.FAIL), (512, Status.OK), (resource.RLIM_INFINITY, Status.OK)]
)
def test_a_limit_and_what_is_wanted(limit: int, status: Status) -> None:
    result = open_files.check_open_files(limit, max_live_requests=256)
    assert result.status is status
    assert "512" in result.sentence


@pytest.mark.parametrize("command", ["serve", "check"])
def test_few_files_are_named_before_anything_starts(tmp_path: Path, command: str) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    gemray = f"{sys.executable} -c 'from gemray_cluster.cli import main; main()'"
    ran = subprocess.run(
        ["bash", "-c", f"ulimit -n 64; exec {gemray} {command} --model {model} --port 0 --device cpu"],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    told = ran.stdout + ran.stderr
    assert ran.returncode in (1, 3), told
    assert "open files (ulimit -n) = 64 is too few: at least 512 are wanted" in told
    assert "Traceback" not in told
    assert "starting Ray" not in told


def test_a_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (64, 1000)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    open_files.raise_open_files(100)
    assert limits[resource.RLIMIT_NOFILE] == (356, 1000)
    open_files.raise_open_files(10)
    assert limits[resource.RLIMIT_NOFILE] == (356, 1000), "nothing is lowered"
    with pytest.raises(CapacityError, match=r"ulimit -n\) = 1000 is too few: at least 1001"):
        open_files.raise_open_files(745)
