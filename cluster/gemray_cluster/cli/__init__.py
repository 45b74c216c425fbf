"""The `gemray` command. What it is made of is imported where an interrupt already ends it quietly."""

from __future__ import annotations

from gemray.cli.run import Commands, run


def main() -> None:
    """Run a command; what gemray raises on purpose becomes one sentence and an exit code."""
    run(_commands)


def _commands() -> Commands:
    from gemray_cluster.cli.commands import app
    from gemray_cluster.cli.exit_codes import exit_code_of

    return Commands(app, exit_code_of)
