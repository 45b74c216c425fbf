"""gemray demo: everything on this machine, one prompt answered, all cleaned up."""

from __future__ import annotations

from typing import Annotated

import typer

from gemray_cluster.cli.ray_environment import prepare_ray_environment

PROMPT = "Write a Python function that tells whether a number is prime."


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = PROMPT,
    *,
    max_tokens: Annotated[int, typer.Option(metavar="INTEGER", help="Most tokens to generate.")] = 120,
    temperature: Annotated[float, typer.Option(metavar="NUMBER", help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="INTEGER", help="Equal seeds give equal answers, in fast bfloat16 up to near ties.")
    ] = 0,
    openai: Annotated[
        bool, typer.Option("--openai", help="Instead, serve the model with OpenAI's HTTP API until Ctrl-C.")
    ] = False,
    http_port: Annotated[int, typer.Option(metavar="INTEGER", help="Port for --openai; 0 takes a free one.")] = 8000,
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
