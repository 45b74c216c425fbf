"""A server of the embedded family over plain processes: ``python -m`` this module. See `process_server.serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from gemray_workers.rank.worker import RankWorker
from support.chaos.family import served_config
from support.chaos.paced_worker import PacedWorker
from support.cluster.process_server import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heartbeat-s", type=float, default=30.0)
    parser.add_argument("--drain-s", type=float, default=300.0)
    parser.add_argument("--paced", action="store_true", help="let ranks rest in each step")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    served = serve(
        served_config(options.ranks),
        port=options.port,
        replicas=options.replicas,
        heartbeat_s=options.heartbeat_s,
        drain_s=options.drain_s,
        worker_class=PacedWorker if options.paced else RankWorker,
    )
    sys.exit(asyncio.run(served))
