"""gemray check: would `gemray serve` start."""

from __future__ import annotations

import typer

from gemray.cli.exit_codes import FAILED
from gemray_cluster.cli.options import load_settings, with_settings
from gemray_cluster.cli.ray_environment import prepare_ray_environment


@with_settings
def check(flags: dict[str, str | None]) -> None:
    """Check whether `gemray serve` would start with the same flags, and say what is missing.

    Ports, the model here and on each node, Ray, room for the ranks by node, /dev/shm, the network interface. Nothing
    is loaded. Ends with 1 when something would keep the server from starting.
    """
    settings = load_settings(flags)
    prepare_ray_environment()

    import asyncio

    from gemray_cluster.check.result import failed
    from gemray_cluster.check.run import check_all
    from gemray_cluster.observability.printed_lines import answers_alone

    with answers_alone() as answers:
        results = asyncio.run(check_all(settings, lambda result: print(result, file=answers, flush=True)))
    problems = failed(results)
    print(f"{len(problems)} of {len(results)} checks failed" if problems else "gemray serve can start")
    if problems:
        raise typer.Exit(FAILED)
