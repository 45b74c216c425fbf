"""What Ray's own processes wait for each other, as its environment variables, where the machine is slow and shared.

By default a raylet ends when its agent, another Python process, has not registered within half a minute or so. One that
has ended as it began, as its agent told no port within 15 s, which nothing changes, is waited for, too: in vain, so no
longer than one takes that comes up.
"""

from __future__ import annotations

from support.waiting import HANG_S

RAY_PATIENCE = {
    "RAY_agent_register_timeout_ms": str(int(1000 * HANG_S)),
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_worker_register_timeout_seconds": str(int(HANG_S)),
}
