"""Numbers that commands are given: each refusal is one sentence with the flag's name, the value and what is allowed."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from gemray.cli.numbers import Bounds, InvalidNumber
from gemray_cluster.cli import main
from gemray_cluster.cli.commands import app
from gemray_cluster.server.sampling import MAX_ANSWERS, MAX_LOGPROBS
from gemray_cluster.settings import types
from gemray_cluster.settings.settings import ServeSettings, settings_of
from gemray_workers.sampling import bounds

LISTS = [("bench", "batch"), ("bench", "lag"), ("bench", "prefill")]
OTHERS = {"bench": [], "serve": ["--model", "gemray-tiny"], "check": ["--model", "gemray-tiny"]}
"""What a command needs beside the number."""


def numbers_of_signatures() -> Iterator[tuple[str, str]]:
    """Command and parameter of each flag that takes one number, by its type."""
    for command in app.registered_commands:
        callback = command.callback
        assert callback is not None
        for parameter in inspect.signature(callback, eval_str=True).parameters.values():
            kinds: Any = get_args(parameter.annotation) or (parameter.annotation,)
            if {int, float} & {kinds[0], *get_args(kinds[0])}:
                yield callback.__name__, parameter.name


def numbers_of_settings() -> Iterator[tuple[str, str]]:
    kinds = (types.INTEGER, types.INTEGER_OR_AUTO, types.NUMBER, types.SECONDS, types.SIZE, types.SIZE_OR_AUTO)
    for setting in settings_of(ServeSettings):
        if setting.metadata["kind"] in kinds:
            yield from (("serve", setting.name), ("check", setting.name))


NUMBERS = [*numbers_of_signatures(), *numbers_of_settings(), *LISTS]


def told(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int = 2
) -> str:
    """What a command says that refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["gemray", *arguments])
    monkeypatch.setenv("GRPC_TRACE", "")  # this process's gRPC stays as it is
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (status, "")
    return err


def test_every_command_with_numbers_is_looked_at() -> None:
    assert len(NUMBERS) > 60
    assert {command for command, _ in NUMBERS} == {
        "serve", "check", "drain", "generate", "chat", "info", "verify", "openai", "bench", "demo",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["x", "nan", ""])
@pytest.mark.parametrize(("command", "name"), NUMBERS)
def test_what_is_no_number_is_told_with_its_flag(
    command: str, name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    err = told([command, *OTHERS.get(command, []), f"{flag}={text}"], monkeypatch, capsys)
    origin = rf" \(from flag {flag}\)" if command in ("serve", "check") else ""
    assert re.fullmatch(rf"error: {name} = ('{text}'|nan){origin} is not allowed: \w.*\n", err), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--requests", "1"], "requests = 1 is not allowed: an integer 2..64"),
        (["verify", "--max-tokens", "4097"], "max_tokens = 4097 is not allowed: an integer 1..4096"),
        (["verify", "--timeout", "0"], "timeout = 0 is not allowed: seconds > 0"),
        (["generate", "--seed", "-1"], f"seed = -1 is not allowed: an integer 0..{2**64 - 1}"),
        (["generate", "--seed", str(2**64)], f"seed = {2**64} is not allowed: an integer 0..{2**64 - 1}"),
        (["generate", "--top-p", "0"], "top_p = 0 is not allowed: a number > 0 and <= 1"),
        (["generate", "--temperature=-0.5"], "temperature = -0.5 is not allowed: a number 0..100"),
        (["generate", "--n", "2.5"], "n = '2.5' is not allowed: an integer 1..128"),
        (["generate", "--patience", "inf"], "patience = inf is not allowed: seconds >= 0"),
        (["chat", "--top-k", str(2**31)], f"top_k = {2**31} is not allowed: an integer 0..{2**31 - 1}"),
        (["chat", "--seed", "9" * 100], f"seed = {'9' * 40}... is not allowed: an integer 0..{2**64 - 1}"),
        (["info", "--patience", "-1"], "patience = -1 is not allowed: seconds >= 0"),
        (["openai", "--port", "65536"], "port = 65536 is not allowed: an integer 0..65535"),
        (["openai", "--max-message-mib", "0"], "max_message_mib = 0 is not allowed: an integer 1..1024"),
        (["drain", "--deadline-s", "-1"], "deadline_s = -1 is not allowed: seconds >= 0"),
        (["demo", "--max-tokens", "0"], f"max_tokens = 0 is not allowed: an integer 1..{2**31 - 1}"),
        (["demo", "--seed", "-1"], f"seed = -1 is not allowed: an integer 0..{2**64 - 1}"),
        (["bench", "--steps", "0"], "steps = 0 is not allowed: an integer >= 1"),
        (["bench", "--address", "h:1", "--prompt-len", "0"], "prompt_len = 0 is not allowed: an integer >= 1"),
        (["bench", "--address", "h:1", "--batch", "8,0"], "batch = '8,0' is not allowed: integers >= 1, with commas"),
        (["bench", "--lag", "0,2"], "lag = '0,2' is not allowed: integers 0..1, with commas between them"),
        (["bench", "--time-limit", "0"], "time_limit = 0 is not allowed: seconds > 0"),
    ],
)  # fmt: skip
def test_a_number_beyond_its_bounds_is_told_with_them(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err = told(arguments, monkeypatch, capsys)
    assert err.startswith(f"error: {words}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("within", "inside", "outside"),
    [
        (Bounds(int, 0, 20), ["0", "20", " 7 "], ["-1", "21", "1.0", "1e3"]),
        (Bounds(int, 1), ["1", "9" * 400], ["0"]),
        (Bounds[float](float, 0), ["0", "1e308", "-0"], ["-1e-9", "inf", "nan", "1e309", "-inf"]),
        (Bounds[float](float, 0, 1, excludes_least=True), ["1", "1e-9"], ["0", "1.1", "nan"]),
    ],
)
def test_bounds(within: Bounds[Any], inside: list[str], outside: list[str]) -> None:
    assert [within.read("flag", text) for text in inside] == [within.kind(text) for text in inside]
    for text in outside:
        with pytest.raises(InvalidNumber) as caught:
            within.read("flag", text)
        assert caught.value.field == "flag"


@pytest.mark.parametrize(
    ("name", "range_"),
    [
        ("logprobs", f"0..{MAX_LOGPROBS}"),
        ("n", f"1..{MAX_ANSWERS}"),
        ("temperature", f"0..{bounds.MAX_TEMPERATURE:g}"),
        ("top_k", f"0..{bounds.MAX_TOP_K}"),
    ],
)
def test_bounds_of_a_request_are_the_servers(name: str, range_: str) -> None:
    (callback,) = [c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == "generate"]
    option = get_args(inspect.signature(callback, eval_str=True).parameters[name].annotation)[1]
    assert option.help.endswith(f"; {range_}.")
