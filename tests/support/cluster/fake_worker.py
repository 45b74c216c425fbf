"""A worker without a model: ranks meet over gloo, rank 0 echoes keyed tokens. For tests of what runs workers.

Token p of a request is `expected_token(seed, p)`, so a replay with `emitted_ids` continues where it stopped.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from typing_extensions import override

from gemray_workers.channel import ChannelAddress, LeadChannel
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.errors import CapacityError, CheckpointError, CommunicationError
from gemray_workers.messages import (
    Cancel,
    Choice,
    Compiling,
    EngineStats,
    FinishReason,
    GangFailed,
    ModelInfo,
    RankInfo,
    SequenceDelta,
    SpeculationCounters,
    StepOutput,
    Stop,
    Submit,
)
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.process import RankSetup, set_up_process
from gemray_workers.rank.worker import RankWorker
from gemray_workers.sampling.verify import Accept, verify

STEP_S = 0.005
SILENT_PROMPT = [666]
"""A request with this prompt makes rank 0 hang."""
DEADLY_PROMPT = [667]
"""A request with this prompt ends rank 0's process."""
COMPILING_PROMPT = [668]
"""A request with this prompt has rank 0 compile programs for `NUM_PROGRAMS * COMPILATION_S`."""
NUM_PROGRAMS = 3
COMPILATION_S = 3.0
HELD = "/held until there is "
"""Begins the path of a model that loads once the file named behind it exists."""

FAKE_HASH = "hash"
"""File of a model's directory that holds its hash."""
FAULTY = "/faulty"
"""Path of a model under which rank 0 sees after `FAULTY_STEPS` that rank 1 is gone, which says why `FAULT_S` later."""
FAULTY_STEPS = 40
FAULT_S = 0.3


def expected_token(seed: int, position: int) -> int:
    return (seed * 7919 + position * 104729) % 1000


class FakeWorker(RankWorker):
    @override
    def checkpoints(self) -> list[CheckpointIdentity]:
        file = Path(self._config.model_path) / FAKE_HASH
        return [CheckpointIdentity(name="fake", hash=file.read_text() if file.exists() else "")]

    @override
    def load(self, setup: RankSetup, *, accept: Accept = verify) -> tuple[ModelInfo, RankInfo]:
        set_up_process(self._rank, self._config.gang_size, setup)
        if self._config.model_path == "/missing":
            raise CheckpointError("/missing/config.json: no such file")
        if self._config.model_path == "/no-room":
            raise CapacityError("weights of 9 GiB do not fit the 3 GiB that are free")
        if self._config.model_path == "/late" and self._rank == 1:
            raise CommunicationError("rank 0 did not come to the barrier")
        if self._config.model_path == "/dies" and self._rank == 1:
            os._exit(3)
        time.sleep(60.0 if self._config.model_path == "/slow" else 0.0)
        if self._config.model_path.startswith(HELD):
            while not Path(self._config.model_path.removeprefix(HELD)).exists():
                time.sleep(0.05)
        size = self._config.tensor_parallel_size
        self._join(setup.rendezvous)
        assert self._comm is not None
        total = self._comm.all_reduce(torch.tensor([self._rank + 1.0]))
        assert total.item() == size * (size + 1) / 2
        self._comm.set_timeout(self._config.collective_timeout_s)
        model = ModelInfo(
            model_type="fake", hidden_size=8, num_layers=1, num_attention_heads=1, layer_types=["full_attention"],
            vocab_size=1000, max_model_len=4096, max_position_embeddings=4096, dtype=self._config.dtype,
            tensor_parallel_size=size, sliding_window=16, choices=[Choice("worker", "fake", "a test")],
            checkpoint=CheckpointIdentity(name="fake"),
        )  # fmt: skip
        return model, RankInfo(
            rank=self._rank,
            host=str(os.getpid()),
            device=f"cpu:{torch.get_num_threads()}",
            shard_indices={},
            weight_bytes=0,
            kv_groups=[],
            load_seconds={"weights": 1.5, "warm-up": 0.25 + self._rank},
        )

    @override
    def run(self, address: ChannelAddress | None) -> None:
        assert self._comm is not None
        if address is None:
            steps = 0
            while self._comm.broadcast_bytes(None) != b"stop":
                steps += 1
                if self._config.model_path == FAULTY and steps == FAULTY_STEPS:
                    time.sleep(FAULT_S)
                    raise ValueError("what rank 1 did wrong")
            return
        channel = LeadChannel(address)
        try:
            self._echo(channel, self._comm)
        except Exception as error:
            channel.send(GangFailed(f"rank 0: {error}"))
            raise
        finally:
            channel.close()

    def _echo(self, channel: LeadChannel, comm: TorchCommunicator) -> None:
        running: dict[str, tuple[Submit, int]] = {}
        step = 0
        stopping = False
        while not (stopping and not running):
            deltas: list[SequenceDelta] = []
            for message in channel.poll(0.0 if running else 0.1):
                match message:
                    case Submit():
                        if message.prompt_ids == SILENT_PROMPT:
                            time.sleep(3600)
                        if message.prompt_ids == DEADLY_PROMPT:
                            os._exit(9)
                        if message.prompt_ids == COMPILING_PROMPT:
                            for _ in range(NUM_PROGRAMS):
                                channel.send(Compiling())
                                time.sleep(COMPILATION_S)
                        running[message.request_id] = (message, len(message.emitted_ids))
                    case Cancel(request_id):
                        if running.pop(request_id, None):
                            deltas.append(SequenceDelta(request_id=request_id, token_ids=[], finish="cancelled"))
                    case Stop():
                        stopping = True
                        deltas += [SequenceDelta(request_id=r, token_ids=[], finish="cancelled") for r in running]
                        running.clear()
            comm.broadcast_bytes(b"step")
            if self._config.model_path == FAULTY and step + 1 == FAULTY_STEPS:
                raise CommunicationError("broadcast failed: connection closed by peer")
            time.sleep(STEP_S)
            for request_id, (submit, count) in list(running.items()):
                finish: FinishReason | None = "length" if count + 1 >= submit.params.max_tokens else None
                deltas.append(
                    SequenceDelta(
                        request_id=request_id, token_ids=[expected_token(submit.params.seed, count)], finish=finish
                    )
                )
                running[request_id] = (submit, count + 1)
                if finish:
                    del running[request_id]
            step += 1
            channel.send(StepOutput(deltas, _stats(step, len(running))))
        comm.broadcast_bytes(b"stop")


def _stats(step: int, num_running: int) -> EngineStats:
    return EngineStats(
        step=step, num_running=num_running, num_waiting=0, num_preemptions=0, pages_in_use={}, pages_total={},
        prompt_tokens=0, generated_tokens=0, last_step_seconds=STEP_S, speculation=SpeculationCounters(),
    )  # fmt: skip
