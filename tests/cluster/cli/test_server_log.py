"""`--log-format json`: every line that the server writes is an object, its last error too."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gemray_cluster.cli.server_log import printed_lines
from gemray_cluster.observability.json_lines import JsonLines
from gemray_cluster.observability.metrics import RequestMetrics
from gemray_cluster.observability.request_trace import RequestTrace
from support.cluster.command import gemray


def lines_of(log: logging.Logger) -> io.StringIO:
    """What `log` writes as JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    log.handlers = [handler]
    return written


def test_lines_are_objects_whatever_they_say() -> None:
    log = logging.Logger("some.name")
    written = lines_of(log)
    log.warning("two\nlines %s", "\u2028")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("broken")
    one, other = (json.loads(line) for line in written.getvalue().splitlines() if line)
    assert (one["level"], one["logger"], one["message"]) == ("WARNING", "some.name", "two\nlines \u2028")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
    assert "exception" not in one
    assert other["exception"].endswith("ValueError: why")


def test_a_request_has_fields() -> None:
    log = logging.getLogger("gemray.request")
    handlers, level, written = log.handlers, log.level, lines_of(log)
    log.setLevel(logging.INFO)
    try:
        trace = RequestTrace("Generate", RequestMetrics(CollectorRegistry()), request_id='a "b"')
        trace.ended(grpc.StatusCode.UNAVAILABLE)
    finally:
        log.handlers = handlers
        log.setLevel(level)
    (line,) = (json.loads(text) for text in written.getvalue().splitlines())
    request = line["request"]
    assert (request["id"], request["outcome"], request["status"]) == ('a "b"', "unavailable", "UNAVAILABLE")
    assert isinstance(request["duration_ms"], float)


def test_what_is_printed_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    """As Ray prints on its own threads: a text and its end are written one after the other."""
    log = logging.getLogger("stdout")
    handlers, written = log.handlers, lines_of(log)
    try:
        with printed_lines("json"):
            other = threading.Thread(target=print, args=("from another\n  thread\n",))
            print("one", end=" ")
            other.start()
            other.join()
            print("text", 2, flush=True)
            print()
            sys.stdout.write("without an end")
        with printed_lines("text"):
            print("as it is")
    finally:
        log.handlers = handlers
    lines = [json.loads(text) for text in written.getvalue().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("WARNING", "from another\n  thread"),
        ("WARNING", "one text 2"),
    ]
    assert capsys.readouterr().out == "as it is\n"


def test_a_start_that_fails_says_so_as_an_object(tmp_path: Path) -> None:
    result = gemray("serve", "--model", str(tmp_path), "--log-format", "json", "--port", "0")
    assert result.returncode == 2
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert (lines[-1]["level"], str(tmp_path) in lines[-1]["message"]) == ("ERROR", True)
    assert result.stdout == ""
