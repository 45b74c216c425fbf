"""Log lines as JSON objects, one a line, for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from typing_extensions import override

REQUEST = "request"
"""Attribute of a record that holds the fields of a request's line; a key of its object."""


class JsonLines(logging.Formatter):
    """``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``; ``request`` or ``exception`` where there is one."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, REQUEST, None)
        if request is not None:
            line[REQUEST] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: some readers take U+2028 for a line's end
