"""A script that fails is seen, with what it says; and it is the interpreter that runs kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels import interpreted


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [("assert not 'a sum'", 1, "AssertionError"), ("sys.exit(3)", 3, ""), ("os.kill(os.getpid(), 9)", -9, "")],
)
def test_a_failure_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int, told: str) -> None:
    script = f"import os, sys\nprint('said', file=sys.stderr, flush=True)\n{end}\n"
    (tmp_path / "interpret_it.py").write_text(script)
    monkeypatch.setattr(interpreted, "SCRIPTS", tmp_path)
    with pytest.raises(AssertionError) as failure:
        interpreted.interpreted("it")
    found, errors = failure.value.args[0]
    assert found == str(code)
    assert errors.startswith("said\n")
    assert told in errors


def test_scripts_change_nothing_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import triton\nprint(triton.knobs.runtime.interpret, vars(triton).get('mine'))\ntriton.mine = 1\n"
    (tmp_path / "interpret_it.py").write_text(script)
    monkeypatch.setattr(interpreted, "SCRIPTS", tmp_path)
    assert [interpreted.interpreted("it") for _ in range(2)] == ["True None\n"] * 2
