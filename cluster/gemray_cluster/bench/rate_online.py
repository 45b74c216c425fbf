"""A running server under a load, as its clients see it: a thread a request, begun when the request arrives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Thread
from typing import Any
from uuid import uuid4

import grpc

from gemray.client.connection import connected
from gemray.client.server_address import ServerAddress
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.bench.answers import Answer, rate_row
from gemray_cluster.bench.load import Arrival, Load
from gemray_cluster.bench.report import RateRow


class ServerLoad:
    """Loads for one server."""

    def __init__(self, server: ServerAddress, load: Load) -> None:
        """Ask the server what it is; raises what `connected` does."""
        self._server, self._load = server, load
        self._salt = uuid4().hex  # an earlier run of the same load is not to be found in the server's prefix cache
        with connected(server) as stub:
            self._model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)

    def warm_up(self) -> None:
        """Send what comes before a measurement."""
        self._send(self._load.warm_up(self._model.vocab_size))

    def row(self, rate: float) -> RateRow:
        """Send the requests of one rate, wait for all of them, and sum up what became of them."""
        answers = self._send(self._load.arrivals(rate, self._model.vocab_size))
        method = self._model.drafter.method if self._model.HasField("drafter") else "none"
        device = ", ".join(sorted({rank.device for rank in self._model.ranks}))
        return rate_row(self._server.address, "server", self._load, rate, answers, method=method, device=device)

    def _send(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        answers = [Answer(arrival.at_s) for arrival in arrivals]
        with connected(self._server) as stub:
            began = time.perf_counter()
            threads = []
            for arrival, answer in zip(arrivals, answers, strict=True):
                time.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
                threads.append(Thread(target=_call, args=(stub, self._request(arrival), answer, began), daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join()
        return answers

    def _request(self, arrival: Arrival) -> pb.GenerateStreamRequest:
        drawn = self._load.sampling == "published"  # what the server takes where a request says nothing
        return pb.GenerateStreamRequest(
            token_ids=pb.TokenIds(ids=arrival.prompt_ids),
            sampling=pb.SamplingParameters(
                temperature=None if drawn else 0.0,
                max_tokens=arrival.num_tokens,
                seed=arrival.seed,
                ignore_eos=True,
            ),
            cache_salt=self._salt,
        )


def _call(stub: Any, request: pb.GenerateStreamRequest, answer: Answer, began: float) -> None:
    try:
        for message in stub.GenerateStream(request):
            if message.HasField("delta") and message.delta.token_ids:
                answer.messages.append((time.perf_counter() - began, len(message.delta.token_ids)))
    except grpc.RpcError as error:
        answer.refusal = f"{error.code().name}: {error.details()}"
