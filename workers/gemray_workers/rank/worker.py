"""One rank of a gang, launched by Ray in a cluster and as a plain process in tests."""

from __future__ import annotations

import gc
import socket
from dataclasses import replace

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from gemray_workers.channel import ChannelAddress, LeadChannel
from gemray_workers.checkpoint.hub import on_this_node
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.checkpoint.progress import progress_bar
from gemray_workers.config import EngineConfig
from gemray_workers.engine.graphs import Captures
from gemray_workers.engine.planner import Inbox
from gemray_workers.execution.compiled_programs import compiled_programs
from gemray_workers.messages import Compiling, GangFailed, ModelInfo, RankInfo
from gemray_workers.model.moe import OnExperts
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.self_test import self_test
from gemray_workers.parallel.torch_communicator import TorchCommunicator, join_gang
from gemray_workers.rank.all_reduce import choose_all_reduce, reduced_dtypes
from gemray_workers.rank.card_memory import CardMemory, card_memory
from gemray_workers.rank.compile_ahead import compile_ahead
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.kv_room import find_kv_memory
from gemray_workers.rank.lifeline import hold_lifeline
from gemray_workers.rank.load_laps import LoadLaps
from gemray_workers.rank.process import LocateProcess, RankFacts, RankSetup, open_store, process_facts, set_up_process
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.whereabouts import Whereabouts, whereabouts
from gemray_workers.sampling.verify import Accept, verify


class RankWorker:
    """A rank's process: says where it runs, joins the gang, loads, warms up, and runs until told to stop.

    The launcher makes one in each process; the coordinator calls its public methods from afar (`Rank.call`).
    """

    def __init__(self, config: EngineConfig, rank: int, locate: LocateProcess) -> None:
        """Do nothing heavy yet.

        Args:
            config: the gang's settings, the same on every rank.
            rank: this process's rank.
            locate: where this process runs.
        """
        self._config = _on_this_node(config)
        self._rank = rank
        self._location = locate(config)
        self._lifeline: socket.socket | None = None
        self._store: TCPStore | None = None
        self._comm: TorchCommunicator | None = None
        self._card: CardMemory | None = None
        self._engine_rank: EngineRank | None = None
        self._drafter_rank: DrafterRank | None = None

    def facts(self) -> RankFacts:
        """Where this process runs and with what."""
        return process_facts(self._location)

    def checkpoints(self) -> list[CheckpointIdentity]:
        """What this node has in the directories of the model and of the drafters; raises CheckpointError."""
        config = self._config
        return [
            CheckpointIdentity.of_directory(path, has_weights=not config.random_weights)
            for path in (config.model_path, *config.drafter_paths)
        ]

    def end_with_coordinator(self, host: str, port: int) -> None:
        """Tie this process's life to that of the coordinator, which listens there: it ends when that is gone."""
        self._lifeline = hold_lifeline(host, port)

    def whereabouts(self) -> Whereabouts:
        """What this process does now; answered while `load` or `run` is busy."""
        return whereabouts([] if self._comm is None else self._comm.exchanges())

    def open_rendezvous(self, host: str) -> str:
        """Serve the ranks' meeting point at a free port of `host`; its ``tcp://host:port``. Rank 0 alone."""
        self._store, rendezvous = open_store(host, self._config.start_deadline_s)
        return rendezvous

    def load(self, setup: RankSetup, *, accept: Accept = verify) -> tuple[ModelInfo, RankInfo]:
        """Join the gang, load this rank's part, generate a few tokens. Every rank must be loading.

        Args:
            setup: what the coordinator decided from all ranks' facts.
            accept: the rule of verification that will be run with: graphs that are captured now hold it.
        """
        laps = LoadLaps(compiled_programs(), lambda: self.captures)
        device = self._location.device()
        self._location.bind_device()
        self._card = card_memory(device)  # before anything of this process lies there
        set_up_process(self._rank, self._config.gang_size, setup)
        gang = self._join(setup.rendezvous)
        self_test(gang, device=device, dtypes=reduced_dtypes(self._config))
        laps.end("peers")
        with progress_bar("loading weights", rank=self._rank) as progress:
            if self._rank == self._config.tensor_parallel_size:
                self._drafter_rank = DrafterRank(self._config, self._gang_of_many(), device, progress, card=self._card)
            else:
                self._engine_rank = self._build_engine_rank(gang, device, progress)
        report = None if self._engine_rank is None else self._engine_rank.load_report
        laps.end("weights", within={} if report is None else {"layout": report.settling_s})
        if self._comm is not None:  # not left to the first collective: this names the ranks that are late
            self._comm.wait_for_all("loaded its weights", self._config.start_deadline_s)
            laps.end("peers")
        rank = self._engine_rank or self._drafter_rank
        assert rank is not None
        if device.type == "cuda":
            compile_ahead(rank.rehearsal(), ranks_here=setup.ranks_here)
        laps.end("rehearsal")
        if self._config.kv_memory_bytes is None:
            find_kv_memory(rank, gang, self._config, ranks_here=setup.ranks_here)
            laps.end("KV memory")
        model, info = self._warm_up(accept)
        laps.end("warm-up")
        if self._comm is not None:
            self._comm.set_timeout(self._config.collective_timeout_s)
        return model, msgspec.structs.replace(info, load_seconds=laps.seconds)

    @property
    def captures(self) -> Captures:
        """What capturing graphs has cost so far; nothing where there are none."""
        rank = self._engine_rank or self._drafter_rank
        return Captures() if rank is None else rank.captures

    def run(self, address: ChannelAddress | None) -> None:
        """Step until the coordinator says stop; rank 0 is given the channel's address."""
        self._location.bind_device()  # a call may come on another thread than the one before
        if address is None:
            self.run_offline(None)
        else:
            self._lead(address)

    def run_offline(
        self,
        inbox: Inbox | None,
        *,
        accept: Accept = verify,
        lag: int | None = None,
        on_experts: OnExperts | None = None,
    ) -> None:
        """Step until a plan says stop, on rank 0 fed by an inbox of this process. All ranks are given the same.

        Args:
            inbox: None on ranks that follow.
            accept: the rule of verification; measurements may make up another.
            lag: as in `EngineRank.engine`.
            on_experts: as in `EngineRank.engine`.
        """
        if self._drafter_rank is not None:
            self._drafter_rank.engine(accept=accept, kernel_by_kernel=on_experts is not None).run()
        elif self._engine_rank is None:
            raise RuntimeError("run() before load()")
        else:
            self._engine_rank.engine(inbox, accept=accept, lag=lag, on_experts=on_experts).run()

    def _lead(self, address: ChannelAddress) -> None:
        channel = LeadChannel(address)
        try:
            with compiled_programs().heard_by(lambda: channel.send(Compiling())):
                self.run_offline(channel)
        except Exception as error:
            channel.send(GangFailed(f"rank {self._rank}: {type(error).__name__}: {error}"))
            raise
        finally:
            channel.close()

    def _build_engine_rank(self, gang: Communicator, device: torch.device, progress: ProgressFn | None) -> EngineRank:
        if self._config.drafter_placement == "colocated":
            choose_all_reduce(self._config, gang, device)
            return EngineRank(self._config, gang, device, progress, card=self._card)
        everyone = self._gang_of_many()
        target = everyone.subgroup(self._config.tensor_parallel_size, "target")
        choose_all_reduce(self._config, target, device)
        return EngineRank(self._config, target, device, progress, gang=everyone, card=self._card)

    def _warm_up(self, accept: Accept) -> tuple[ModelInfo, RankInfo]:
        if self._drafter_rank is not None:
            self._drafter_rank.warm_up(accept)
            return self._drafter_rank.model_info(), self._drafter_rank.rank_info()
        assert self._engine_rank is not None
        self._engine_rank.warm_up(accept)
        return self._engine_rank.model_info(), self._engine_rank.rank_info()

    def _gang_of_many(self) -> TorchCommunicator:
        assert self._comm is not None, "a gang with a dedicated drafter has at least two ranks"
        return self._comm

    def close(self) -> None:
        """Free this rank's part and leave the gang.

        In this order: NCCL does not let go of a group while a captured graph holds one of its collectives.
        """
        self._engine_rank = None
        self._drafter_rank = None
        gc.collect()  # models, graphs and the engine refer to each other
        if self._comm is not None:
            self._comm.close()
            self._comm = None
        self._store = None

    def _join(self, rendezvous: str) -> Communicator:
        size = self._config.gang_size
        if size == 1:
            return SoloCommunicator()
        self._comm = join_gang(
            self._rank,
            size,
            rendezvous,
            device=self._location.device(),
            # Until it serves: a colder disk or compiler may keep a rank for longer than a step may take.
            timeout_s=self._config.start_deadline_s,
        )
        return self._comm


def _on_this_node(config: EngineConfig) -> EngineConfig:
    """The same, with the directories that hold target and drafters on this process's node."""
    drafter, second = config.drafter_path, config.second_drafter_path
    return replace(
        config,
        model_path=on_this_node(config.model_path),
        drafter_path=None if drafter is None else on_this_node(drafter),
        second_drafter_path=None if second is None else on_this_node(second),
    )
