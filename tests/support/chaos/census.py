"""What a server and its ranks hold: to be the same before many requests and after them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gemray.client import AsyncClient

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Holdings:
    """What one process holds."""

    file_descriptors: int
    threads: int
    shared_memory: int
    """Files of /dev/shm that it has mapped or open."""


@dataclass(frozen=True)
class Census:
    """What all hold."""

    num_processes: int
    """The server and what it has started."""
    requests: int
    """Live ones, as the server counts them."""
    connections: int
    """Clients' connections, the one that asks this included."""
    pages: int
    """KV pages in use, of all groups of all replicas."""
    placement_groups: int
    """Reservations of Ray that hold resources or wait for them; 0 without Ray."""
    by_process: dict[str, Holdings]
    """What the server and each rank hold."""

    def more_than(self, before: Census) -> list[str]:
        """What has grown, in words."""
        grown = [
            f"{name}: {was} -> {now}"
            for name, was, now in [
                ("processes", before.num_processes, self.num_processes),
                ("live requests", before.requests, self.requests),
                ("connections", before.connections, self.connections),
                ("KV pages", before.pages, self.pages),
                ("placement groups", before.placement_groups, self.placement_groups),
            ]
            if now > was
        ]
        if set(self.by_process) != set(before.by_process):
            grown.append(f"processes: {sorted(before.by_process)} -> {sorted(self.by_process)}")
        for name, now in self.by_process.items():
            was = before.by_process.get(name, now)
            grown += [
                f"{kind} of {name}: {vars(was)[kind]} -> {count}"
                for kind, count in vars(now).items()
                if count > vars(was)[kind]
            ]
        return grown

    def total(self) -> str:
        """The sums, as a row of a table of Markdown."""
        holdings = self.by_process.values()
        counts = [
            self.num_processes,
            sum(each.threads for each in holdings),
            sum(each.file_descriptors for each in holdings),
            sum(each.shared_memory for each in holdings),
            self.requests,
            self.connections,
            self.pages,
            self.placement_groups,
        ]
        return " | ".join(map(str, counts))


TOTALS = (
    "processes | threads | file descriptors | shared memory | live requests | connections | KV pages | placement groups"
)
"""What `Census.total` lists."""


async def take_census(
    address: str, server: psutil.Process, ranks: Iterable[int], *, placement_groups: int = 0
) -> Census:
    """Count now.

    Args:
        address: where the server listens.
        server: its process.
        ranks: the process ids of its ranks.
        placement_groups: those of its Ray.
    """
    async with AsyncClient(address) as client:
        stats = await client.server_stats()
        port = int(address.rpartition(":")[2])
        established = [c for c in server.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    named = {"the server": server, **{f"rank process {pid}": psutil.Process(pid) for pid in ranks}}
    return Census(
        num_processes=1 + len(server.children(recursive=True)),
        requests=stats.requests.active,
        connections=sum(c.laddr.port == port for c in established),
        pages=sum(pool.pages_in_use for pool in stats.engine.pools),
        placement_groups=placement_groups,
        by_process={name: _holdings(process) for name, process in named.items()},
    )


def _holdings(process: psutil.Process) -> Holdings:
    paths = [Path(each.path) for each in process.memory_maps()]
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            paths.append(descriptor.readlink())
    shared = {path for path in paths if path.is_relative_to(SHARED_MEMORY)}
    return Holdings(process.num_fds(), process.num_threads(), len(shared))
