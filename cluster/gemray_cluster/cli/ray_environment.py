"""Variables that Ray and gRPC read while they are imported; set before that."""

from __future__ import annotations

import os

DEFAULTS = {
    # A Ray that is started here writes a token to ~/.ray/auth_token; a cluster's is read from there.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A call after the cluster has gone must fail, not start another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Nobody asks Ray which calls there were, and to leave a Ray whose GCS has died takes 5 s in which to tell it.
    "RAY_task_events_report_interval_ms": "0",
    # Ray starts its processes while our server already listens; gRPC would comment on each of them.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


def prepare_ray_environment() -> None:
    """Set what the user has not. Changes after `import ray` would reach only some of Ray's processes."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
