"""Keyed noise and the choice of tokens on CUDA against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemray_kernels.reference import keyed_noise
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.logprobs import token_logprobs
from gemray_workers.sampling.state import SamplingState
from support.kernels.choice_parity import CASES, PUBLISHED
from support.oracles.sampling_oracle.chooser import choose_tokens
from support.oracles.sampling_oracle.rows import RowRequest, SamplingRows
from support.oracles.sampling_reference import choose_rows, local_columns, sampling_params

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 64, "top_p": 0.95},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_k": 5, "suppress_tokens": (0, 1, 2), "logit_bias": {130: 3.0, 255: -4.0}},
    {"allowed_token_ids": tuple(range(100, 259, 3)), "repetition_penalty": 1.4, "presence_penalty": 0.3},
]


def noise_functions() -> Any:
    functions = [pytest.param(keyed_noise.keyed_gumbel, id="torch")]
    try:
        from gemray_kernels.triton import keyed_noise as triton_keyed_noise
    except ImportError:
        return functions
    return [*functions, pytest.param(triton_keyed_noise.keyed_gumbel, id="triton")]


@pytest.mark.parametrize("noise", noise_functions())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@pytest.mark.parametrize("ids", [torch.arange(262144), torch.arange(70).view(7, 10) * 3000], ids=["vocabulary", "few"])
def test_noise_on_cuda_equals_the_cpu(noise: Any, dtype: torch.dtype, tolerance: float, ids: Any) -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 99, 12])
    positions = torch.tensor([0, 7, 2**32 - 1, 2**33 + 5, 1, 131071, 4])
    expected = keyed_noise.keyed_gumbel(seeds, positions, ids, dtype)
    found = noise(seeds.cuda(), positions.cuda(), ids.cuda(), dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_choices_on_cuda_equal_the_cpu() -> None:
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


@pytest.mark.parametrize("name", [*CASES, *PUBLISHED])
def test_the_kernels_choose_what_the_reference_chooses(name: str) -> None:
    from gemray_kernels.triton.token_choice import TritonKernels

    case = {**CASES, **PUBLISHED}[name]
    assert list(case.mismatches(TritonKernels(), torch.device("cuda"))) == []


PARAMS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "published": [{"top_k": 64, "top_p": 0.95, "suppress_tokens": (258882, 258883)}],
    "all": [{"temperature": 0.0, "repetition_penalty": 1.2}, {"top_k": 70}, {"top_p": 0.8, "logit_bias": {5: 2.0}}],
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_captured_choice_follows_the_tables(name: str) -> None:
    """Captured once, replayed for other logits, positions and requests: the ids are those of an eager choice."""
    cuda, comm = torch.device("cuda"), SoloCommunicator()
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=262144)
    state = SamplingState(3, shard, torch.float32, cuda)
    features = Features.union(Features.of(sampling_params(**params)) for params in PARAMS[name])
    state.reserve(features)
    logits_RV = torch.randn(6, 262144, device=cuda) * 6
    slot_R = torch.tensor([0, 0, 1, 1, 2, 3], device=cuda)  # the last row is padding
    position_R = torch.tensor([9, 10, 5, 6, 7, 0], device=cuda)
    drafts_RB = torch.tensor([[-1], [8], [-1], [9], [-1], [-1]], device=cuda)

    def chosen() -> Any:
        return choose(
            logits_RV, slot_R, position_R, state, comm, features=features, drafts_RB=drafts_RB, softcap=30.0
        ).ids_R

    chosen()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids_R = chosen()
    found = []
    for round_number in range(4):
        for slot in range(3):
            if round_number:
                state.release(slot)
            kinds = PARAMS[name]
            params = sampling_params(seed=round_number * 7 + slot, **kinds[(slot + round_number) % len(kinds)])
            state.admit(slot, params, [3, 1, 4, round_number], 3)
        logits_RV.normal_().mul_(6)
        position_R.add_(1)
        graph.replay()
        found.append(ids_R.tolist())
        assert found[-1] == chosen().tolist()
    assert len({tuple(ids) for ids in found}) == 4


def test_logprobs_on_cuda_equal_log_softmax() -> None:
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=259)
    logits_RV = torch.randn(5, 259, generator=torch.Generator().manual_seed(2))
    logits_RV[:, [200, 9]] = 6.0
    ids_R = torch.tensor([1, 2, 3, 200, 258])
    found = token_logprobs(local_columns(logits_RV, shard).cuda(), ids_R.cuda(), 4, shard, SoloCommunicator())
    expected = logits_RV.double().log_softmax(dim=-1)
    for row, answer in enumerate(found.listed()):
        assert answer.logprob == pytest.approx(expected[row, ids_R[row]].item(), abs=1e-5)
        assert [i for i, _ in answer.top[:2]] == [9, 200]
