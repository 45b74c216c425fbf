"""The centroid head's argmax rule: the largest value, and among equals the smallest id, wherever they stand."""

from __future__ import annotations

import pytest
import torch

from gemray_workers.drafters.mtp.config import CentroidConfig
from gemray_workers.drafters.mtp.heads import CentroidHead
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, sampling_params
from support.processes.gang import RunOnGang

VOCAB, CLUSTERS, WIDTH = 256, 8, 4
CPU = torch.device("cpu")


def greedy_with_ties(comm: Communicator, tied: list[int]) -> int:
    """The draft when the ids of `tied` share the largest logit, each cluster holding every eighth id backwards."""
    shard = ShardIndices.of_rank(comm.rank, comm.size, org_vocab_size=VOCAB)
    sharding = WeightSharding(comm.rank, comm.size, torch.float64, CPU)
    table = VocabParallelEmbedding("table", shard, WIDTH, comm, sharding, scale=1.0)
    head = CentroidHead(table, shard, CentroidConfig(num_centroids=CLUSTERS, top_k=CLUSTERS), WIDTH, VOCAB, sharding)
    weight = torch.zeros(VOCAB, WIDTH, dtype=torch.float64)
    weight[tied] = 1.0
    ids = shard.global_ids()
    table.table_VH[ids >= 0] = weight[ids[ids >= 0]]
    centroids, ordering = (target.copies[0].destination for target in head.weight_targets())
    centroids.copy_(torch.eye(CLUSTERS, WIDTH))
    ordering.copy_(torch.arange(VOCAB - 1, -1, -1).view(-1, CLUSTERS).T.flatten())
    logits_SV = head(torch.ones(1, WIDTH, dtype=torch.float64))
    requests = [RowRequest(params=sampling_params(temperature=0.0), position=3, prompt_len=2)]
    return int(choose_rows(logits_SV, requests, shard, comm).ids_R[0])


@pytest.mark.parametrize("tied", [[200, 7, 90], [64, 63], [255, 128, 127], [31]])
def test_the_smallest_id_wins(run_on_gang: RunOnGang, tied: list[int]) -> None:
    assert greedy_with_ties(SoloCommunicator(), tied) == min(tied)
    for tp in (2, 4):
        assert run_on_gang(tp, greedy_with_ties, tied) == [min(tied)] * tp
