"""Keyed noise and the choice of tokens on CUDA against the CPU."""

from __future__ import annotations

import pytest
import torch

from gemray_kernels import keyed_noise
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.logprobs import token_logprobs
from support.sampling_oracle.chooser import choose_tokens
from support.sampling_oracle.rows import RowRequest, SamplingRows
from support.sampling_reference import choose_rows, local_columns, sampling_params

pytestmark = pytest.mark.gpu

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 64, "top_p": 0.95},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_k": 5, "suppress_tokens": (0, 1, 2), "logit_bias": {130: 3.0, 255: -4.0}},
    {"allowed_token_ids": tuple(range(100, 259, 3)), "repetition_penalty": 1.4, "presence_penalty": 0.3},
]


def noise_functions():
    functions = [pytest.param(keyed_noise.keyed_gumbel, id="torch")]
    try:
        from gemray_kernels import triton_keyed_noise
    except ImportError:
        return functions
    return [*functions, pytest.param(triton_keyed_noise.keyed_gumbel, id="triton")]


@pytest.mark.parametrize("noise", noise_functions())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@pytest.mark.parametrize("ids", [torch.arange(262144), torch.arange(70).view(7, 10) * 3000], ids=["vocabulary", "few"])
def test_noise_on_cuda_equals_the_cpu(noise, dtype, tolerance, ids):
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 99, 12])
    positions = torch.tensor([0, 7, 2**32 - 1, 2**33 + 5, 1, 131071, 4])
    expected = keyed_noise.keyed_gumbel(seeds, positions, ids, dtype)
    found = noise(seeds.cuda(), positions.cuda(), ids.cuda(), dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_choices_on_cuda_equal_the_cpu():
    """In float64, ties included."""
    org, added, num_rows = 1010, 16, 7 * 40
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=org, num_added=added)
    generator = torch.Generator().manual_seed(11)
    logits_RV = torch.randint(-9, 9, (num_rows, org + added), generator=generator).double() / 2
    logits_RV[3, 17] = torch.nan
    logits_RV[9] = -torch.inf
    logits_RV = local_columns(logits_RV, shard)
    requests = [
        RowRequest(sampling_params(seed=2**64 - 1 - i, **KINDS[i % 7]), 6, 2, token_ids=[7, 250, 7, 130, 7, i])
        for i in range(num_rows)
    ]
    expected = choose_tokens(logits_RV, SamplingRows.build(requests), shard, SoloCommunicator())
    found = choose_rows(logits_RV, requests, shard, SoloCommunicator(), device=torch.device("cuda"))
    assert found.ids_R.tolist() == expected.ids_R.tolist()
    assert found.ok_R.tolist() == expected.ok_R.tolist()
    assert [i for i, ok in enumerate(expected.ok_R.tolist()) if not ok] == [3, 9]


def test_logprobs_on_cuda_equal_log_softmax():
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=259)
    logits_RV = torch.randn(5, 259, generator=torch.Generator().manual_seed(2))
    logits_RV[:, [200, 9]] = 6.0
    ids_R = torch.tensor([1, 2, 3, 200, 258])
    answers = token_logprobs(local_columns(logits_RV, shard).cuda(), ids_R.cuda(), 4, shard, SoloCommunicator())
    expected = logits_RV.double().log_softmax(dim=-1)
    for row, answer in enumerate(answers):
        assert answer.logprob == pytest.approx(expected[row, ids_R[row]].item(), abs=1e-5)
        assert [i for i, _ in answer.top[:2]] == [9, 200]
