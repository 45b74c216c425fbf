"""Processes that fork from one that has imported what ranks and commands do: four seconds of CPU time less each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "gemray_workers.rank.worker",
    # What reading a checkpoint's config imports, of which transformers makes a thousand modules.
    "transformers.models.auto.modeling_auto",
    "transformers.models.gemma4.configuration_gemma4",
    # Half a second of each command, and neither Ray nor gRPC.
    "gemray_cluster.cli.commands",
    "pydantic.types",
    "gemray.v1.generation_pb2",
]
"""Installed modules: the server that forks does not see where pytest finds `support`."""


def forking() -> ForkServerContext:
    """A context whose processes have nothing of this one but what they are given; not even its environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
