"""Where `gemray demo` writes."""

from __future__ import annotations

from typing import TextIO

import pytest

from gemray_cluster.cli import demo_run


def test_answers_alone_go_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve_and_ask(request: object, prompt: str, console: object, answers_to: TextIO) -> None:
        print("(raylet) a worker died")
        print("yes", file=answers_to)

    monkeypatch.setattr(demo_run, "_run", serve_and_ask)
    demo_run.run("why?", max_tokens=1, temperature=0.0, seed=0)
    assert capsys.readouterr() == ("yes\n", "(raylet) a worker died\n")
