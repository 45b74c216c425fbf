"""Run every fault over TP 2 x 2 replicas of the embedded family and 20 streams, and print what came of it.

PYTHONPATH=tests python -m support.chaos --output table.md
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from support.chaos.family import answers_alone, requests
from support.chaos.faults import Outcome, faults_of, kill_server, strike, table
from support.chaos.server_process import START_S, FamilyServer
from support.chaos.streams import Streams


async def main(options: argparse.Namespace) -> int:
    """Every fault once; 0 when no request was lost or changed."""
    asked = requests(options.streams, options.max_tokens)
    expected = answers_alone(asked)
    arguments = [f"--replicas={options.replicas}", f"--ranks={options.ranks}", f"--heartbeat-s={options.heartbeat_s}"]
    server = await FamilyServer.start(options.log, *arguments)
    outcomes: list[Outcome] = []
    streams = Streams(server.address, asked, expected)

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"{outcome} whole={streams.num_whole} wrong={len(streams.wrong)}", file=sys.stderr, flush=True)

    try:
        for index, fault in enumerate(faults_of(options.ranks)):
            tell(await strike(server, streams, fault, index % options.replicas))
        port = server.address.rpartition(":")[2]
        again = [*arguments, f"--port={port}"]
        outcome, server = await kill_server(server, streams, lambda: FamilyServer.start(options.log, *again))
        tell(outcome)
        await streams.end(START_S)
    finally:
        await streams.cancel()
        await server.kill()
    text = (
        f"{table(outcomes)}\n\n{streams.num_whole} answers were whole and equal to one rank without a drafter; "
        f"{len(streams.wrong)} were lost or changed.\n"
    )
    print(text, "\n".join(streams.wrong), sep="")
    if options.output is not None:
        options.output.write_text(text)
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
