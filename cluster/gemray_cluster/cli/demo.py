"""gemray demo: everything on this machine, one prompt answered, all cleaned up."""

from __future__ import annotations

from typing import Annotated

import typer

from gemray.cli.numbers import INT32_MAX, UINT64_MAX, integer, number
from gemray_cluster.cli.ray_environment import prepare_ray_environment

PROMPT = "Write a Python function that tells whether a number is prime."


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = PROMPT,
    *,
    max_tokens: Annotated[int, integer("max_tokens", "Most tokens to generate.", least=1, most=INT32_MAX)] = 120,
    temperature: Annotated[float, number("temperature", "0 is greedy.", least=0, most=100)] = 0.0,
    seed: Annotated[int, integer("seed", "Equal seeds give equal answers.", least=0, most=UINT64_MAX)] = 0,
    openai: Annotated[
        bool, typer.Option("--openai", help="Instead, serve the model with OpenAI's HTTP API until Ctrl-C.")
    ] = False,
    http_port: Annotated[int, integer("http_port", "Port for --openai, 0 for a free one.", least=0, most=65535)] = 8000,
) -> None:
    """Serve the embedded model here on two workers, three times (no drafter, MTP, DFlash): the answers are equal."""
    prepare_ray_environment()

    if openai:
        from gemray.openai.serve import Listening

        listening = Listening(port=http_port)
        listening.open().close()  # a port that is taken shows before Ray starts

        from gemray_cluster.cli.demo_openai import run as run_openai

        run_openai(listening)
        return

    from gemray_cluster.cli.demo_run import run

    run(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
