"""A server of the embedded family over plain processes: ``python -m`` this module. See `process_server.serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from support.chaos.family import served_config
from support.cluster.process_server import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heartbeat-s", type=float, default=30.0)
    parser.add_argument("--drain-s", type=float, default=300.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    served = serve(
        served_config(options.ranks),
        port=options.port,
        replicas=options.replicas,
        heartbeat_s=options.heartbeat_s,
        drain_s=options.drain_s,
    )
    sys.exit(asyncio.run(served))
