"""`gemray bench --address`: a server as its clients see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from gemray_cluster.bench.report import Report
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.forked_command import ForkedCommand
from support.cluster.serving import serving
from support.waiting import HANG_S


async def test_a_server_under_concurrent_requests(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    gang = FakeGang(Script([180, 213, 106], group_sizes=(2,)))
    async with serving(tokenizer, gang) as running:
        process = await ForkedCommand.start(
            "bench", "--address", running.server.address, "--batch", "1,3", "--prompt-len", "5",
            "--steps", "3", "--output", str(tmp_path),
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, err.decode()
    report = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report)
    assert [row.batch for row in report.online] == [1, 3]
    prompts = [tuple(submit.prompt_ids) for submit in gang.submitted]
    warm_up, measured = {*prompts[:1], *prompts[2:5]}, {*prompts[1:2], *prompts[5:]}
    assert (len(prompts), len(warm_up), len(measured)) == (2 * (1 + 3), 3, 3), "each batch once to warm up"
    assert not warm_up & measured
    salts = [submit.cache_salt for submit in gang.submitted]
    assert len({*salts}) == 4, "what is measured would be found in the server's prefix cache"
    assert all(row.first_token.samples == row.batch and row.tokens_per_s > 0 for row in report.online)
    assert "first token ms" in out.decode()
    assert {submit.params.draft_method for submit in gang.submitted} == {"auto"}


async def test_requests_to_a_server_name_a_drafter(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    gang = FakeGang(Script([180, 213, 106]), gang_info=gang_info(num_draft_tokens=4, two_drafters=True))
    async with serving(tokenizer, gang) as running:
        process = await ForkedCommand.start(
            "bench", "--address", running.server.address, "--batch", "1", "--prompt-len", "5",
            "--steps", "3", "--draft-method", "auto,dflash,none", "--output", str(tmp_path),
        )  # fmt: skip
        _, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, err.decode()
    report = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report)
    assert [row.method for row in report.online] == ["mtp+dflash", "dflash", "none"]
    named = [submit.params.draft_method for submit in gang.submitted]
    assert named == ["auto", "auto", "dflash", "dflash", "none", "none"]
