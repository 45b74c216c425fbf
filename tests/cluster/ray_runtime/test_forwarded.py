"""Which of the server's variables every rank of a cluster is given."""

from __future__ import annotations

from gemray_cluster.ray_runtime.forwarded import forwarded_variables


def test_what_concerns_collectives_is_given_to_every_rank() -> None:
    given = {
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_FR_BUFFER_SIZE": "4000",
    }
    assert forwarded_variables({**given, "HOME": "/root", "TORCH_HOME": "/models", "MY_NCCL_DEBUG": "INFO"}) == given
