"""Flags of `gemray generate` and `chat`: each is a field of the request, and what it brings is shown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.sampling.params import SamplingParams
from support.cluster.command import run
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import Serving, serving

TOOLS = json.dumps([{"name": name, "parameters": {"type": "object"}} for name in ("look_up", "add")])
FLAGS: dict[str, tuple[str, Any]] = {
    "--max-tokens": ("max_tokens", 9),
    "--min-tokens": ("min_tokens", 2),
    "--temperature": ("temperature", 0.5),
    "--top-k": ("top_k", 7),
    "--top-p": ("top_p", 0.25),
    "--min-p": ("min_p", 0.125),
    "--repetition-penalty": ("repetition_penalty", 1.5),
    "--presence-penalty": ("presence_penalty", -0.5),
    "--frequency-penalty": ("frequency_penalty", 0.25),
    "--seed": ("seed", 2**63),
    "--draft-method": ("draft_method", "mtp"),
    "--draft-tokens": ("num_draft_tokens", 3),
}
"""The parameter of a run and its value."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    gang = FakeGang(Script([180, 213, 106], group_sizes=(2,)))
    gang.gang_info = gang_info(num_draft_tokens=4)
    async with serving(tokenizer, gang) as running:
        yield running


def newest(served: Serving) -> SamplingParams:
    return served.gang.submitted[-1].params


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.asyncio(loop_scope="module")
async def test_each_flag_is_its_field(served: Serving, command: str) -> None:
    flags = [text for flag, (_, value) in FLAGS.items() for text in (flag, str(value))]
    code, _, err = await run(command, *flags, "--address", served.server.address, stdin="Hi")
    assert code == 0, err
    params = newest(served)
    assert {name: getattr(params, name) for name, _ in FLAGS.values()} == dict(FLAGS.values())


@pytest.mark.asyncio(loop_scope="module")
async def test_what_no_flag_names_is_left_to_the_server(served: Serving) -> None:
    code, _, _ = await run("generate", "Hi", "--address", served.server.address)
    params = newest(served)
    assert (code, params.draft_method, params.num_draft_tokens, params.logits_checksum) == (0, "auto", None, False)
    assert params.stop_token_ids  # the checkpoint's
    code, _, _ = await run("generate", "Hi", "--ignore-eos", "--address", served.server.address)
    assert (code, newest(served).stop_token_ids) == (0, ())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_word_is_forbidden(served: Serving, tokenizer: ChatTokenizer) -> None:
    code, _, _ = await run("generate", "Hi", "--bad-word", "a", "--bad-word", "b", "--address", served.server.address)
    ids = {tokenizer.encode(word)[-1] for word in "ab"}
    assert code == 0
    assert ids <= set(newest(served).suppress_tokens)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_drafter_that_the_server_lacks_is_told(served: Serving) -> None:
    code, _, err = await run("generate", "Hi", "--draft-method", "dflash", "--address", served.server.address)
    assert (code, err.count("\n")) == (2, 1)
    assert "speculation.method = 'dflash' is not allowed: one of auto, none, mtp on this server" in err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.asyncio(loop_scope="module")
async def test_the_checkpoint_that_is_to_answer(served: Serving, command: str) -> None:
    arguments = (command, "--address", served.server.address, "--checkpoint-hash")
    code, out, err = await run(*arguments, "0123", stdin="Hi")
    assert (code, out) == (0, "Hi\n"), err
    for other in ("4567", ""):
        code, out, err = await run(*arguments, other, stdin="Hi")
        assert (code, out) == (2, "")
        assert f"checkpoint_hash = {other!r} is not served here: '0123' is" in err


@pytest.mark.asyncio(loop_scope="module")
async def test_checksums_stand_beside_the_tokens(served: Serving) -> None:
    arguments = ("generate", "Hi", "--logits-checksum", "--address", served.server.address)
    code, out, err = await run(*arguments)
    *lines, statistics = err.splitlines()
    assert (code, out, len(lines)) == (0, "Hi\n", 3)
    assert newest(served).logits_checksum
    told = [line.split("\t") for line in lines]
    assert [(len(line), line[1], len(line[3])) for line in told] == [(4, "180", 16), (4, "213", 16), (4, "106", 16)]
    assert "seed" in statistics
    code, out, _ = await run(*arguments, "--json")
    entries = json.loads(out)["logprobs"]
    assert [f"{int(entry['logits_checksum']):016x}" for entry in entries] == [line[3] for line in told]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_prompts_log_probabilities(served: Serving, tokenizer: ChatTokenizer) -> None:
    """Under a heading where the answer has some, too."""
    arguments = ("generate", "Hello", "--raw", "--prompt-logprobs", "1", "--address", served.server.address)
    count = len(tokenizer.encode("Hello")) - 1
    code, _, err = await run(*arguments)
    assert (code, len(err.splitlines())) == (0, count + 1)
    code, _, err = await run(*arguments, "--logprobs", "0")
    lines = err.splitlines()
    assert (code, lines[0], lines[count + 1], len(lines)) == (0, "[prompt]", "[answer]", count + 2 + 3 + 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_long_prompt_is_cut_where_that_is_asked_for(served: Serving, tokenizer: ChatTokenizer) -> None:
    arguments = ("generate", "--raw", "--address", served.server.address)
    code, _, err = await run(*arguments, stdin="Hello " * 400)
    assert (code, "prompt" in err) == (2, True)
    code, _, _ = await run(*arguments, "--truncate-prompt-tokens", "5", stdin="Hello " * 400)
    assert (code, len(served.gang.submitted[-1].prompt_ids)) == (0, 5)


@pytest.mark.parametrize(("choice", "asks"), [("required", True), ("look_up", True), ("none", False)])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_may_be_asked_for(served: Serving, choice: str, asks: bool) -> None:
    arguments = ("--tools", TOOLS, "--tool-choice", choice, "--max-tokens", "2", "--address", served.server.address)
    code, _, err = await run("generate", "Hi", *arguments)
    assert code == 0, err
    assert (newest(served).grammar is not None) is asks


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tool-choice", "none"), "tool_choice = 'none' is not allowed: unset without --tools"),
        (("--raw", "--tool-choice", "none"), "raw = True is not allowed: unset with --system"),
        (("--tools", TOOLS, "--tool-choice", "lookup"), "lookup"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_choice_of_no_tool_is_told(served: Serving, flags: tuple[str, ...], told: str) -> None:
    code, _, err = await run("generate", "Hi", *flags, "--address", served.server.address)
    assert (code, told in err, err.count("\n")) == (2, True, 1), err
