"""Whether the GCS of a Ray answers, asked beside Ray's library.

Ray's own calls wait for a GCS that hangs without end, and when it is killed while one of them waits, the library ends
this whole process a minute later.
"""

from __future__ import annotations

import grpc

from gemray.channel_options import NO_PROXY

CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_NO_FIELDS = b""


async def answers(address: str, deadline_s: float) -> bool:
    """Whether the GCS at HOST:PORT says anything within `deadline_s` seconds.

    That it wants a token, or does not know the method, is an answer, too.
    """
    async with grpc.aio.insecure_channel(address, options=(NO_PROXY,)) as channel:
        check = channel.unary_unary(CHECK_ALIVE, bytes, bytes)
        try:
            await check(_NO_FIELDS, timeout=deadline_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return True
