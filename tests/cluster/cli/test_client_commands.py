"""`gemray generate`, `chat` and `info` for scripts: files, JSON, commands of a chat, errors, completion."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from gemray_cluster.cli import main
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import MemoryInfo
from support.cluster.calls import call_ids
from support.cluster.command import gemray, run
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S

GIB = 1 << 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(Script([180, 213, 106], group_sizes=(2,)))) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_puts_files_and_stdin_behind_the_prompt(
    served: Serving, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("Notes.\n")
    code, out, _ = await run(
        "generate", "Sum up.", "--file", str(tmp_path / "notes"), "--file", "-", "--system", "Be kind.",
        "--address", served.server.address, stdin="Piped.\n",
    )  # fmt: skip
    assert (code, out) == (0, "Hi\n")
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Sum up.\n\nNotes.\n\nPiped."},
    ]
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode_chat(turns)
    code, _, err = await run("generate", "Hi", "--file", str(tmp_path / "none"), "--address", served.server.address)
    assert (code, "file = " in err) == (2, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_without_a_prompt_reads_stdin(served: Serving, tokenizer: ChatTokenizer) -> None:
    code, out, _ = await run("generate", "--raw", "--address", served.server.address, stdin="Hello")
    assert (code, out) == (0, "Hi\n")
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode("Hello")


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        ((), b"", "prompt = '' is not allowed: a text that is not blank"),
        (("--raw",), b" \n", "prompt = ' \\n' is not allowed: a text that is not blank"),
        (("-", "--file", "-"), b"Hi", "file = '-' is not allowed: named once"),
        ((), b"a\xffb", "stdin = 'byte 1' is not allowed: UTF-8 text"),
        (("Hi", "--timeout", "0"), b"", "timeout = 0 is not allowed: seconds > 0"),
        (
            ("Hi", "--schema", "none"),
            b"",
            "schema = 'none' is not allowed: JSON that begins with { or [, or a readable",
        ),
    ],
)
def test_generate_says_what_is_wrong_with_its_input(
    arguments: tuple[str, ...],
    stdin: bytes,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gemray", "generate", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    monkeypatch.setenv("GRPC_TRACE", "")  # this process's gRPC stays as it is
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"error: {told}")
    assert err.count("\n") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_as_json(served: Serving) -> None:
    arguments = ("generate", "Hi", "--json", "--logprobs", "1", "--seed", "5", "--address", served.server.address)
    code, out, err = await run(*arguments)
    assert (code, err) == (0, "")
    whole = json.loads(out)
    assert (whole["text"], whole["token_ids"], len(whole["logprobs"])) == ("Hi", [180, 213, 106], 3)
    assert whole["completion"]["seed"] == "5"
    code, out, _ = await run(*arguments, "--stream")
    *deltas, last = (json.loads(line) for line in out.splitlines())
    assert "".join(message["delta"].get("text", "") for message in deltas) == "Hi"
    assert last["final"]["finish_reason"] == "FINISH_REASON_STOP_TOKEN"


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_prints_log_probabilities(served: Serving) -> None:
    code, out, err = await run("generate", "Hi", "--logprobs", "2", "--address", served.server.address)
    assert (code, out) == (0, "Hi\n")
    assert err.splitlines()[0] == '"H"\t180\t-0.5180\t"<pad>":-0.0000 "<eos>":-1.0000'


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_gives_other_programs_the_answer_without_thoughts(
    served: Serving, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    thought, answer = tokenizer.encode("hush")[1:], tokenizer.encode("Hello")[1:]
    monkeypatch.setattr(served.gang, "script", Script([100, *thought, 101, *answer, 106], group_sizes=(3, 20)))
    code, out, _ = await run("generate", "Hi", "--address", served.server.address)
    assert (code, out) == (0, "Hello\n")


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_shows_calls(
    served: Serving, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = [*tokenizer.encode("I ask.")[1:], *call_ids(tokenizer, "f", {"a": "b"}), *call_ids(tokenizer, "g", {})]
    monkeypatch.setattr(served.gang, "script", Script([*ids, 50], group_sizes=(3,)))
    (tmp_path / "tools").write_text('[{"name": "f"}, {"name": "g"}]')
    for stream in ([], ["--stream"]):
        arguments = ("generate", "Hi", "--tools", str(tmp_path / "tools"), "--address", served.server.address, *stream)
        code, out, err = await run(*arguments)
        assert (code, out) == (0, 'I ask.\nf({"a":"b"})\ng({})\n')
        assert err.startswith("tool_call, ")
    code, out, err = await run(*arguments, "--raw")
    assert (code, "raw = " in err) == (2, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_gives_several_answers(served: Serving) -> None:
    arguments = ("generate", "Hi", "--n", "2", "--logprobs", "0", "--seed", "3", "--address", served.server.address)
    code, out, err = await run(*arguments)
    assert (code, out) == (0, "[answer 0]\nHi\n[answer 1]\nHi\n")
    assert err.count('"H"\t180') == 2
    assert "6 tokens" in err
    code, out, _ = await run(*arguments, "--json")
    whole = json.loads(out)
    assert [whole["text"], *(answer["text"] for answer in whole["other_answers"])] == ["Hi", "Hi"]
    code, _, err = await run(*arguments, "--stream")
    assert (code, "stream = True" in err) == (2, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_generate_asks_for_a_form(served: Serving, tmp_path: Path) -> None:
    schema = '{"type": "object"}'
    (tmp_path / "schema").write_text(schema)
    (tmp_path / "grammar").write_text("start: /[ab]+/")
    (tmp_path / "blank").write_text("\n")
    asked = {
        ("--schema", schema): ("json_schema", schema),
        ("--schema", str(tmp_path / "schema")): ("json_schema", schema),
        ("--regex", "[ab]+"): ("regex", "[ab]+"),
        ("--choice", "yes", "--choice", "no"): ("choice", '["yes", "no"]'),
        ("--grammar", str(tmp_path / "grammar")): ("lark", "start: /[ab]+/"),
    }
    for flags, form in asked.items():
        code, _, _ = await run("generate", "Hi", *flags, "--max-tokens", "2", "--address", served.server.address)
        grammar = served.gang.submitted[-1].params.grammar
        assert grammar is not None
        assert (code, grammar.kind, grammar.text) == (0, *form)
    for flags, words in (
        (("--schema", schema, "--regex", "a"), "regex = 'a'"),
        (("--schema", str(tmp_path / "none")), "schema = "),
        (
            ("--schema", str(tmp_path / "blank")),
            "blank' is not allowed: JSON that begins with { or [, or a text file that",
        ),
        (("--grammar", str(tmp_path / "blank")), "blank' is not allowed: a text file that is not blank"),
        (("--regex", "("), "structured.regex"),
    ):
        code, _, err = await run("generate", "Hi", *flags, "--address", served.server.address)
        assert (code, words in err, err.count("\n")) == (2, True, 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_chat_commands(served: Serving, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    lines = [
        "/help",
        "One",
        "/reset",
        "/system Be kind.",
        "Two\\",
        "lines",
        f"/save {saved}",
        "/nothing",
        "/exit",
        "Three",
    ]
    code, out, err = await run("chat", "--address", served.server.address, stdin="\n".join(lines))
    assert code == 0
    assert out.count("Hi") == 2, "nothing after /exit"
    assert "/save FILE" in err
    assert "/nothing is no command" in err
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Two\nlines"}]
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode_chat(turns)
    assert json.loads(saved.read_text()) == [*turns, {"role": "assistant", "content": "Hi"}]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_ends_a_turn_and_not_the_chat(served: Serving, tokenizer: ChatTokenizer) -> None:
    too_long = "word " * 400
    code, out, err = await run("chat", "--address", served.server.address, stdin=f"{too_long}\nTwo\n")
    assert (code, out) == (2, "Hi\n"), "stdin is no terminal: the status tells of the turn"
    assert err.count("error: ") == 1
    assert served.gang.submitted[-1].prompt_ids == tokenizer.encode_chat([{"role": "user", "content": "Two"}])


@pytest.mark.asyncio(loop_scope="module")
async def test_info_tells_where_each_ranks_memory_is(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of an earlier version tells nothing of it, and has no table."""
    code, out, _ = await run("info", "--address", served.server.address)
    assert (code, "headroom" in out) == (0, False)
    gang = served.gang.gang_info
    memory = MemoryInfo(
        total=80 * GIB, weights=30 * GIB, drafter=0, kv=35 * GIB, graphs=GIB, work=3 * GIB, elsewhere=3 * GIB,
        headroom=8 * GIB, kv_budget=36 * GIB,
    )  # fmt: skip
    ranks = [msgspec.structs.replace(rank, memory=memory) for rank in gang.ranks]
    monkeypatch.setattr(served.gang, "gang_info", msgspec.structs.replace(gang, ranks=ranks))
    code, out, _ = await run("info", "--address", served.server.address)
    assert code == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    for row in (
        "weights 30.0 GiB 30.0 GiB",
        "drafter 0 B 0 B",
        "KV pages 35.0 GiB 35.0 GiB",
        "headroom 8.0 GiB 8.0 GiB",
    ):
        assert row in rows


@pytest.mark.asyncio(loop_scope="module")
async def test_info_as_json(served: Serving) -> None:
    code, out, _ = await run("info", "--json", "--address", served.server.address)
    told = json.loads(out)
    assert (code, told["model"]["vocab_size"], told["stats"]["state"]) == (0, 2048, "SERVER_STATE_SERVING")


def test_a_token_is_not_sent_in_plain_text(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    result = gemray("info", "--address", "192.0.2.1:1", "--auth-token-file", str(tmp_path / "token"))
    assert result.returncode == 2
    assert "auth_token_file = " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_handshake_that_fails_is_one_sentence(served: Serving) -> None:
    """gRPC has log lines of its own for it, which nobody has asked for."""
    code, out, err = await run("info", "--address", served.server.address, "--tls")
    assert (code, out) == (5, "")
    assert err.startswith(f"error: {served.server.address}: ")
    assert err.count("\n") == 1


def test_a_misspelt_flag_is_told() -> None:
    result = gemray("serve", "--kv-memroy", "2GiB")
    assert result.returncode == 2
    assert "--kv-memory" in result.stderr


def test_shell_completion_lists_commands_and_flags() -> None:
    """The variables that the script of --install-completion sets when a user presses tab."""
    words = "gemray generate --js"
    environment = {**os.environ, "_GEMRAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
    script = "import sys; sys.argv[0] = 'gemray'; from gemray_cluster.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False, env=environment
    )
    assert "--json" in result.stdout
