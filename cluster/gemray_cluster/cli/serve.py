"""gemray serve: start a gang and serve it until told to end."""

from __future__ import annotations

from gemray_cluster.cli.options import load_settings, with_settings
from gemray_cluster.cli.ray_environment import prepare_ray_environment
from gemray_cluster.cli.server_log import quiet_ray


@with_settings
def serve(flags: dict[str, str | None]) -> None:
    """Serve a model over gRPC.

    Each flag is also a variable (--kv-memory: GEMRAY_KV_MEMORY) and a key of --config's file (kv_memory); flags win
    over variables, variables over the file. SIGTERM and Ctrl-C let live requests finish; a second one does not,
    and ends the command with 130, as does one that comes before the server is ready.
    """
    settings = load_settings(flags)
    log_format = settings.server_config().log_format
    prepare_ray_environment()
    quiet_ray(log_format)

    from gemray_cluster.cli.serve_loop import run

    run(settings)
