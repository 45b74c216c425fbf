"""`gemray check` for real, and the same checks at the start of `gemray serve`."""

from __future__ import annotations

import os
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from gemray_cluster.check import at_start
from gemray_cluster.check.at_start import look_before_start
from gemray_cluster.check.model_directory import Checkpoints
from gemray_cluster.check.result import CheckResult, Status
from gemray_cluster.check.run import Listener
from gemray_cluster.cli.commands import app
from gemray_workers.errors import CapacityError
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.command import run
from support.cluster.ray_patience import RAY_PATIENCE
from support.cluster.ray_turns import NOT_UP, TRIES, rays_turn
from support.waiting import HANG_S

pytestmark = pytest.mark.timeout(TRIES * HANG_S)

GEMRAY = Path(sysconfig.get_path("scripts")) / "gemray"


def test_a_machine_that_can_serve(tmp_path: Path) -> None:
    """With an empty home and no word about authentication: gemray turns Ray's token on by itself."""
    model = write_servable_checkpoint(tmp_path / "model")
    del_mode = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    for _ in range(TRIES):
        with rays_turn():
            done = subprocess.run(
                [GEMRAY, "check", f"--model={model}", "--tp=2", "--device=cpu", "--local-num-cpus=2", "--port=0"],
                env={**del_mode, **RAY_PATIENCE, "HOME": str(tmp_path)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=HANG_S,
            )
        if NOT_UP not in done.stdout:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gemray serve can start" in done.stdout
    for name in ("grpc port", "model", "ray", "resources", "shared memory", "interface"):
        assert f"{name}: " in done.stdout
    assert (tmp_path / ".ray" / "auth_token").exists()


async def _run_in_turn(*command: str) -> tuple[int, str, str]:
    """As `run`, of a command that starts a Ray."""
    for _ in range(TRIES):
        with rays_turn():
            code, out, err = await run(*command)
        if NOT_UP not in out + err:
            break
    return code, out, err


async def test_a_machine_that_cannot(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = f"--model={tmp_path}", "--tp=2", "--device=cuda", "--local-num-gpus=1", f"--port={port}"
        code, out, _ = await _run_in_turn("check", *flags)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("fail")]
    assert f"fail  grpc port: 127.0.0.1:{port} is taken" in lines[0]
    assert "lacks config.json" in lines[1]
    assert "2 x {CPU: 1, GPU: 1} wanted, 1 available" in lines[2]
    assert "lacks config.json, tokenizer.json, model.safetensors" in lines[3], "the node itself looked, too"
    assert out.splitlines()[-1].startswith(f"{len(lines)} of ")


async def test_more_ranks_than_the_machine_ever_holds_are_not_waited_for(tmp_path: Path) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    flags = f"--model={model}", "--tp=4", "--device=cpu", "--local-num-cpus=2", "--port=0", "--kv-memory=32MiB"
    code, _, err = await _run_in_turn("serve", *flags, f"--placement-deadline-s={2 * HANG_S}")
    assert code == 3
    assert "4 x {CPU: 1} wanted, this machine's Ray holds 2: lower --tp, or " in err
    assert "--local-num-cpus 4" in err


async def test_more_ranks_than_the_machine_ever_holds_are_told_as_the_server_would(tmp_path: Path) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    flags = f"--model={model}", "--tp=4", "--device=cpu", "--local-num-cpus=2", "--port=0", "--kv-memory=32MiB"
    code, out, _ = await _run_in_turn("check", *flags)
    assert code == 1
    (line,) = (line for line in out.splitlines() if line.startswith("fail"))
    assert line.startswith("fail  resources: 4 x {CPU: 1} wanted, 2 available (")
    assert line.endswith("): lower --tp, or let ranks share cores with --local-num-cpus 4.")


def test_results_alone_go_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def check_all(settings: object, listener: Listener) -> list[CheckResult]:
        print("(raylet) a worker died")
        listener(CheckResult("model", Status.OK, "there."))
        return []

    monkeypatch.setattr("gemray_cluster.check.run.check_all", check_all)
    app(["check", "--model=gemray-tiny"], standalone_mode=False)
    assert capsys.readouterr() == ("ok    model: there.\ngemray serve can start\n", "(raylet) a worker died\n")


async def test_an_unreachable_cluster_is_a_sentence(tmp_path: Path) -> None:
    flags = f"--model={tmp_path}", "--address=127.0.0.1:9", "--port=0", "--connect-deadline-s=1"
    code, out, err = await run("check", *flags)
    assert code == 1
    assert "fail  ray: " in out
    assert "127.0.0.1:9" in out
    assert "Traceback" not in out + err


@pytest.mark.parametrize(("unfit", "stops"), [([], False), (["10.0.0.2"], False), (["10.0.0.1", "10.0.0.2"], True)])
async def test_a_start_needs_one_fit_node(
    unfit: list[str], stops: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(**_: object) -> list[CheckResult]:
        room = CheckResult("resources", Status.FAIL, "2 wanted, 0 available.")
        models = [
            CheckResult("model", Status.FAIL if node in unfit else Status.OK, f"model on {node}.", node)
            for node in ("10.0.0.1", "10.0.0.2")
        ]
        memory = [CheckResult("shared memory", Status.OK, "enough.", node) for node in ("10.0.0.1", "10.0.0.2")]
        return [room, *models, *memory]

    monkeypatch.setattr(at_start, "check_cluster", found)
    start = look_before_start(num_ranks=2, bundle={"CPU": 1.0}, checkpoints=Checkpoints("/models/target", drafters=()))
    if stops:
        with pytest.raises(CapacityError, match=r"no node is fit.*10\.0\.0\.1.*10\.0\.0\.2"):
            await start
    else:
        await start
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [f"fail  model: model on {node}." for node in unfit]
