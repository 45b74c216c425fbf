"""What `gemray serve` writes to stderr: sentences and log lines for people, or one JSON object a line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from gemray.cli.account import tell
from gemray_cluster.cli.log_lines import PresentStderr
from gemray_cluster.observability.json_lines import JsonLines
from gemray_cluster.observability.printed_lines import printed_lines_as_records
from gemray_cluster.server.config import LogFormat

logger = logging.getLogger("gemray")


def set_up_logging(log_format: LogFormat) -> Callable[[str], None]:
    """Send the process's log lines to stderr in `log_format`; what tells the server's own sentences there."""
    handler = logging.StreamHandler(PresentStderr())
    if log_format == "text":
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(JsonLines())
        ray_logger = logging.getLogger("ray")  # has a handler of its own as soon as Ray is imported
        ray_logger.handlers.clear()
        ray_logger.propagate = True
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return tell if log_format == "text" else logger.info


def exit_with(error: Exception, code: int) -> None:
    """End the process as `gemray.cli.run` does, with the error as a JSON line."""
    logger.error("%s", error)
    sys.stderr.flush()
    sys.exit(code)


def quiet_ray(log_format: LogFormat) -> None:
    """Where JSON is wanted: what the ranks say stays in Ray's files, and what Ray prints is not coloured. Before
    `import ray`.
    """
    if log_format == "json":
        os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


def printed_lines(log_format: LogFormat) -> AbstractContextManager[None]:
    """Where JSON is wanted, log what is printed to standard output in the block."""
    return printed_lines_as_records() if log_format == "json" else nullcontext()
