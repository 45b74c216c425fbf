"""Run every fault over TP 2 x 2 replicas of the embedded family and 20 streams, and print what came of it.

PYTHONPATH=tests python -m support.chaos --output table.md
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from support.chaos.family import answers_alone, requests
from support.chaos.faults import faults_of, kill_server, strike
from support.chaos.report import FaultReport, publish
from support.chaos.server_process import START_S, FamilyServer
from support.chaos.streams import Streams


async def main(options: argparse.Namespace) -> int:
    """Every fault once; 0 when no request was lost or changed."""
    asked = requests(options.streams, options.max_tokens)
    expected = answers_alone(asked)
    arguments = [f"--replicas={options.replicas}", f"--ranks={options.ranks}", f"--heartbeat-s={options.heartbeat_s}"]
    server = await FamilyServer.start(options.log, *arguments)
    report = FaultReport()
    streams = Streams(server.address, asked, expected)
    try:
        for index, fault in enumerate(faults_of(options.ranks)):
            report.tell(await strike(server, streams, {index % options.replicas: fault}), streams)
        port = server.address.rpartition(":")[2]
        again = [*arguments, f"--port={port}"]
        outcome, server = await kill_server(server, streams, lambda: FamilyServer.start(options.log, *again))
        report.tell(outcome, streams)
        await streams.end(START_S)
    finally:
        await streams.cancel()
        await server.kill()
    publish(report.text(streams), streams.wrong, options.output)
    return 1 if streams.wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heartbeat-s", type=float, default=10.0, help="silence after which a gang counts as hung")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="where the server logs")
    parser.add_argument("--output", type=Path, help="where the table goes, too")
    sys.exit(asyncio.run(main(parser.parse_args())))
