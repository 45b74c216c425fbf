"""gemray demo: everything on this machine, one prompt answered, all cleaned up."""

from __future__ import annotations

from typing import Annotated

import typer

from gemray_cluster.cli.ray_environment import prepare_ray_environment

PROMPT = "Explain in one sentence what the import statement does."


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = PROMPT,
    *,
    max_tokens: Annotated[int, typer.Option(metavar="INTEGER", help="Most tokens to generate.")] = 64,
    seed: Annotated[int, typer.Option(metavar="INTEGER", help="Equal seeds give equal answers.")] = 0,
) -> None:
    """Start Ray, two tensor-parallel ranks and a server here, stream one answer, print statistics, end."""
    prepare_ray_environment()

    from gemray_cluster.cli.demo_run import run

    run(prompt, max_tokens=max_tokens, seed=seed)
