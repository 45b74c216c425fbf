"""Processes that fork from one which has imported what a rank needs: four seconds of CPU time less for each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "gemray_workers.rank.worker",
    # What reading a checkpoint's config imports, of which transformers makes a thousand modules.
    "transformers.models.auto.modeling_auto",
    "transformers.models.gemma4.configuration_gemma4",
]
"""Installed modules: the server that forks does not see where pytest finds `support`."""


def forking() -> ForkServerContext:
    """A context whose processes have nothing of this one but what they are given; not even its environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
