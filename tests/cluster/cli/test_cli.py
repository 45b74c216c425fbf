"""The `gemray` command as a user runs it: exit codes, one-sentence errors, client commands against a server."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from gemray.client.errors import RequestFailed
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.cli.exit_codes import exit_code_of
from gemray_cluster.gang.client import GangState
from gemray_cluster.settings.errors import InvalidSetting
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import CapacityError
from gemray_workers.messages import Choice, SpeculationCounters
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.command import GEMRAY, gemray, run
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(Script([180, 213, 106], group_sizes=(2,)))) as running:
        yield running


def test_help_needs_nothing_heavy() -> None:
    probe = (
        "import sys; from gemray_cluster import cli\n"
        "heavy = {'torch', 'ray', 'transformers', 'grpc', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=HANG_S)


def test_version() -> None:
    result = gemray("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"gemray \d+\.\d+\S*\n", result.stdout)


async def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMRAY_KV_MEMROY", "2GiB")
    _, _, err = await run("serve", "--model", "/nowhere")
    assert "warning: GEMRAY_KV_MEMROY is no setting of gemray and does nothing; did you mean GEMRAY_KV_MEMORY?\n" in (
        err
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "model is not set"),
        (["--model", "/nowhere"], 2, "there is no directory /nowhere"),
        (["--model", "/etc/hosts"], 2, "error: /etc/hosts is a file; the model must be a local Hugging Face directory"),
        (
            ["--model", "gemray-tiny-assistant"],
            2,
            "which drafts for a target; --drafter takes it",
        ),
        (["--model", "gemray-tiny-dflash"], 2, "architectures ['DFlashDraftModel']) is not allowed: a Gemma 4 model"),
        (["--model", "/nowhere", "--port", "x"], 2, "port = 'x' (from flag --port)"),
        (["--model", "/nowhere", "--config", "/none.toml"], 2, "from flag --config"),
        (
            ["--model", "gemray-tiny", "--device", "cpu", "--draft-tokens", "4"],
            2,
            "draft_tokens = 4 (from flag --dr",
        ),
        (["--model", "gemray-tiny", "--device", "cpu", "--tp", "3"], 2, "tp = 3 (from flag --tp)"),
    ],
)
async def test_serve_refuses_in_one_sentence(arguments: list[str], code: int, words: str) -> None:
    ended, out, err = await run("serve", *arguments)
    assert ended == code
    assert words in err
    assert err.count("\n") == 1, err
    assert out == ""


async def test_serve_on_a_taken_port(tmp_path: Path) -> None:
    write_servable_checkpoint(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = await run("serve", "--model", str(tmp_path), "--port", str(port))
    assert code == 4
    assert f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n" == err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "-1", "Hi"], b"seed = -1"),
        (["--seed", str(2**64), "Hi"], b"seed = "),
        (["--top-k", str(2**31), "Hi"], b"top_k = "),
        (["--max-tokens", "-1", "Hi"], b"max_tokens = -1"),
        ([b"\xff\xfe"], b"not valid UTF-8"),
    ],
)
def test_values_that_no_message_can_hold(arguments: list[str | bytes], words: bytes) -> None:
    command = [*GEMRAY, "generate", "--address", "127.0.0.1:1", *arguments]
    result = subprocess.run(command, capture_output=True, timeout=HANG_S, check=False)
    assert result.returncode == 2
    assert words in result.stderr
    assert b"Traceback" not in result.stderr


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = gemray("generate", "Hi", "--address", f"127.0.0.1:{port}")
    assert result.returncode == 5
    assert result.stderr.startswith(f"error: 127.0.0.1:{port}: UNAVAILABLE")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.asyncio(loop_scope="module")
async def test_generate(served: Serving, stream: list[str]) -> None:
    code, out, err = await run("generate", "Hi", "--address", served.server.address, "--seed", "5", *stream)
    assert (code, out) == (0, "Hi\n")
    assert "stop_token" in err
    assert "seed 5" in err
    params = served.gang.submitted[-1].params
    assert (params.seed, params.temperature) == (5, 1.0)
    assert served.gang.submitted[-1].prompt_ids[:2] == [2, 105], "the chat template was used"


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_raw_from_stdin(served: Serving, tokenizer: ChatTokenizer) -> None:
    code, out, _ = await run(
        "generate", "-", "--raw", "--temperature", "0", "--address", served.server.address, stdin="Hello"
    )
    assert (code, out) == (0, "Hi\n")
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode("Hello")
    assert served.gang.submitted[-1].params.temperature == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_refused(served: Serving) -> None:
    code, out, err = await run("generate", "Hi", "--stop", "", "--address", served.server.address)
    assert (code, out) == (2, "")
    assert "sampling.stop[0] = '' is not allowed" in err


@pytest.mark.asyncio(loop_scope="module")
async def test_chat_keeps_the_conversation(served: Serving, tokenizer: ChatTokenizer) -> None:
    code, out, _ = await run("chat", "--system", "Be kind.", "--address", served.server.address, stdin="One\n\nTwo\n")
    assert code == 0
    assert out.count("Hi") == 2
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Two"},
    ]
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode_chat(turns)


@pytest.mark.asyncio(loop_scope="module")
async def test_chat_does_not_feed_thoughts_back(
    served: Serving, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    thought, answer = tokenizer.encode("hush")[1:], tokenizer.encode("Hello")[1:]
    script = Script([100, *thought, 101, *answer, 106], group_sizes=(3, 20))
    monkeypatch.setattr(served.gang, "script", script)
    code, out, _ = await run("chat", "--address", served.server.address, stdin="One\nTwo\n")
    assert code == 0
    assert out.count("hush") == 2, "thoughts are shown"
    turns = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Two"},
    ]
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode_chat(turns)


@pytest.mark.asyncio(loop_scope="module")
async def test_info(served: Serving) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4)
    code, out, _ = await run("info", "--address", served.server.address)
    assert code == 0
    for words in (
        "gemma4_text",
        "0..1024",
        "1024..2048",
        "sliding",
        "256 tokens",
        "no GPU",
        "mtp, shared KV",
        "org/fake",
        "0123",
    ):
        assert words in out
    assert len(re.findall(r"\d\s*│ target\s*│ host", out)) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_info_tells_what_a_drafter_gives(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4)
    _, out, _ = await run("info", "--address", served.server.address)
    assert "0 rounds, 0 drafted, 0 accepted" in _unwrapped(out)
    assert "acceptance length" not in _unwrapped(out)
    monkeypatch.setattr(served.gang, "speculation", SpeculationCounters(rounds=20, drafted=80, accepted=50))
    _, out, _ = await run("info", "--address", served.server.address)
    assert "speculation 20 rounds, 80 drafted, 50 accepted, acceptance length 3.50" in _unwrapped(out)


@pytest.mark.asyncio(loop_scope="module")
async def test_info_tells_of_each_drafter(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    served.gang.gang_info = gang_info(num_draft_tokens=4, two_drafters=True)
    parts = [
        SpeculationCounters(rounds=5, drafted=20, accepted=5),
        SpeculationCounters(rounds=1, drafted=8, accepted=7),
    ]
    total = SpeculationCounters(rounds=6, drafted=28, accepted=12, of_drafters=parts)
    monkeypatch.setattr(served.gang, "speculation", total)
    _, out, _ = await run("info", "--address", served.server.address)
    shown = _unwrapped(out)
    assert "drafter 1 fake-assistant: mtp, shared KV, colocated, up to 4 drafts a step" in shown
    assert "drafter 2 fake-dflash: dflash, own KV, colocated, up to 8 drafts a step" in shown
    assert "speculation 6 rounds, 28 drafted, 12 accepted" in shown
    assert "by mtp 5 rounds, 20 drafted, 5 accepted, acceptance length 2.00" in shown
    assert "by dflash 1 rounds, 8 drafted, 7 accepted, acceptance length 8.00" in shown


@pytest.mark.asyncio(loop_scope="module")
async def test_info_tells_how_each_replica_stands(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    served.gang.gang_info = gang_info()
    _, out, _ = await run("info", "--address", served.server.address)
    assert "Replicas" not in out
    (one,) = served.gang.replicas
    other = replace(one, index=1, state=GangState.STARTING, failure="rank 1 died", num_live=3, num_rebuilds=2)
    monkeypatch.setattr(FakeGang, "replicas", [one, other])
    _, out, _ = await run("info", "--address", served.server.address)
    rows = _unwrapped(out[out.index("Replicas") :])
    for words in ("0 serving", "starting: rank 1 died", "3 (0", "2 times", "host cpu"):
        assert words in rows
    stats = await served.stub.GetServerStats(pb.GetServerStatsRequest())
    told = [(r.index, r.state, r.failure, r.active, r.rebuilds, r.engine.steps) for r in stats.replicas]
    assert told == [
        (0, pb.SERVER_STATE_SERVING, "", 0, 0, 7),
        (1, pb.SERVER_STATE_STARTING, "rank 1 died", 3, 2, 7),
    ]
    model = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert [(r.index, r.max_model_len, len(r.ranks)) for r in model.replicas] == [(0, 256, 2), (1, 256, 2)]


@pytest.mark.asyncio(loop_scope="module")
async def test_info_has_no_speculation_without_a_drafter(served: Serving) -> None:
    served.gang.gang_info = gang_info()
    code, out, _ = await run("info", "--address", served.server.address)
    assert code == 0
    assert "speculation" not in out


def _unwrapped(table: str) -> str:
    """A table's text without its lines, however narrow it was drawn."""
    return " ".join(table.replace("│", " ").split())


@pytest.mark.asyncio(loop_scope="module")
async def test_info_tells_each_choice_and_why(served: Serving) -> None:
    shown = gang_info(num_draft_tokens=4)
    choices = [Choice("target backend", "one", "why one"), Choice("drafter backend", "two", "why two")]
    served.gang.gang_info = msgspec.structs.replace(shown, model=msgspec.structs.replace(shown.model, choices=choices))
    code, out, _ = await run("info", "--address", served.server.address)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    for choice in choices:
        assert [choice.what, choice.chosen, choice.reason] in rows


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_with_a_token(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    async with serving(tokenizer, FakeGang(Script([180, 106])), auth_token_file=str(tmp_path / "token")) as guarded:
        address = guarded.server.address
        code, _, err = await run("generate", "Hi", "--address", address)
        assert (code, "UNAUTHENTICATED" in err) == (2, True)
        code, out, _ = await run("generate", "Hi", "--address", address, "--auth-token-file", str(tmp_path / "token"))
        assert (code, out) == (0, "H\n")


def test_exit_codes() -> None:
    assert exit_code_of(InvalidSetting("port", 1, "x", "y")) == 2
    assert exit_code_of(CapacityError("x")) == 3
    assert exit_code_of(RequestFailed("x")) == 1


def test_an_address_that_is_none() -> None:
    result = gemray("info", "--address", "http://here:1")
    allowed = "HOST:PORT or [IPv6]:PORT, with a port of 1 to 65535 and no http://"
    assert result.returncode == 2
    assert result.stderr == f"error: address = 'http://here:1' is not allowed: {allowed}\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_full_disk_is_told_in_a_sentence(served: Serving) -> None:
    with open("/dev/full", "w") as full:
        process = await asyncio.create_subprocess_exec(
            *GEMRAY, "info", "--address", served.server.address, stdout=full, stderr=asyncio.subprocess.PIPE
        )
        _, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 1
    assert err.decode() == "error: the output cannot be written: No space left on device\n"
