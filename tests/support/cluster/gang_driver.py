"""Join the cluster at argv[1], run a gang of two fake workers, print JSON of what happened.

With ``stay`` as argv[2] it prints its ranks' processes and goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from ray.util.placement_group import placement_group_table

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.launcher import StartProgress
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.ray_runtime.launcher import RayGang
from gemray_cluster.ray_runtime.session import RaySession
from gemray_workers.config import EngineConfig
from gemray_workers.errors import GemrayError
from gemray_workers.messages import Submit
from gemray_workers.rank.worker import RankWorker
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_worker import FakeWorker
from support.waiting import HANG_S


async def main(address: str, *, stay: bool) -> None:
    config = ClusterConfig(
        address=address, placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=HANG_S,
        connect_deadline_s=60,
    )  # fmt: skip
    engine = EngineConfig(model_path="/fake", tensor_parallel_size=2, dtype="float32", device="cpu", kv_memory_bytes=1)
    began = time.monotonic()
    waited_for: list[str] = []

    def progress(step: StartProgress) -> None:
        if step.stage == "placement" and step.detail:
            waited_for.append(step.detail)
            print("WAITING", file=sys.stderr, flush=True)

    try:
        session = await RaySession.open(config, num_ranks=2)
        gang = RayGang(session, config, engine, served=ServedCheckpoints(), worker_class=FakeWorker)
        await gang.launch(progress)
    except GemrayError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}))
        return
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=6)
    submit = Submit(request_id="r", prompt_ids=[1], params=params)
    ids = [token async for delta in gang.generate(submit) for token in delta.token_ids]
    if stay:
        pids = [(await rank.call(RankWorker.facts)).pid for rank in gang._ranks]
        print(json.dumps({"pids": pids}), flush=True)
        await asyncio.Event().wait()
    await gang.stop()
    groups = [group["state"] for group in placement_group_table().values()]
    await session.close()
    print(json.dumps({"ids": ids, "waited_for": waited_for, "state": gang.state.value, "groups": groups}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], stay=sys.argv[2:] == ["stay"]))
