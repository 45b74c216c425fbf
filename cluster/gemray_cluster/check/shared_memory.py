"""Is /dev/shm large enough: NCCL and Ray both live there, and a container's default is 64 MB."""

from __future__ import annotations

import shutil

from gemray_cluster.check.result import CheckResult, fail, ok, warn

NAME = "shared memory"
_MIB = 2**20
_FLOOR_BYTES = 64 * _MIB + 1
"""The container default, with which Ray's object store and NCCL die of a bus error."""
_BYTES_PER_LOCAL_RANK = 1024 * _MIB
"""NCCL's buffers between two ranks of a host, with room."""
_BYTES_FOR_RAY = 256 * _MIB


def shared_memory_wanted(local_ranks: int, gang_size: int) -> int:
    """Bytes of /dev/shm that `local_ranks` ranks of gangs of `gang_size` on one host and Ray's object store may use.

    Replicas of one rank each share nothing.
    """
    between_ranks = _BYTES_PER_LOCAL_RANK * local_ranks if min(local_ranks, gang_size) > 1 else 0
    return _BYTES_FOR_RAY + between_ranks


def check_shared_memory(node: str, total_bytes: int, *, local_ranks: int, gang_size: int) -> CheckResult:
    """`total_bytes` is the size of /dev/shm on `node`, which is to hold `local_ranks` ranks of gangs of `gang_size`."""
    wanted = shared_memory_wanted(local_ranks, gang_size)
    sizes = f"/dev/shm of {node} is {total_bytes // _MIB} MiB"
    remedy = (
        "enlarge it (docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with medium Memory, "
        "values shm.worker and shm.driver of the chart)"
    )
    if total_bytes < _FLOOR_BYTES:
        return fail(NAME, f"{sizes}, a container's default, with which NCCL ends in a bus error: {remedy}.")
    if total_bytes < wanted:
        return warn(NAME, f"{sizes}, {wanted // _MIB} MiB wanted for {local_ranks} ranks on that node: {remedy}.")
    return ok(NAME, f"{sizes}, {wanted // _MIB} MiB wanted.")


def local_size() -> int:
    """Size of this host's /dev/shm; 0 where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except FileNotFoundError:
        return 0
