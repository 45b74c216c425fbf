"""The Triton kernels of the token choice where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from support.kernels.choice_parity import CASES, KINDS
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, sampling_params


def test_interpreted_kernels_choose_what_the_reference_chooses() -> None:
    found = dict(line.split("\t") for line in interpreted("token_choice").splitlines())
    assert found == dict.fromkeys(CASES, "")


PUBLISHED = {"top_k": 64, "top_p": 0.95, "suppress_tokens": (258882, 258883)}


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ([{"temperature": 0.0}], ["best_kernel", "merge_kernel", "decide_kernel"]),
        ([PUBLISHED], ["best_kernel", "list_kernel", "merge_kernel", "decide_kernel"]),
        ([PUBLISHED, {}], ["best_kernel", "list_kernel", "merge_kernel", "decide_kernel"]),
        ([KINDS["greedy with penalties"]], ["best_kernel", "merge_kernel", "decide_kernel"]),
        ([{"top_p": 0.9, "logit_bias": {3: 1.0}}], ["edit_kernel", "best_kernel", "merge_kernel", "decide_kernel"]),
        ([{"top_k": 200}], ["decide_kernel"]),
    ],
    ids=["greedy", "published defaults", "... beside unfiltered", "penalties", "top_p and bias", "top_k 200"],
)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_choice_compiles_for_hopper(kinds: list[dict[str, object]], names: list[str], softcap: float | None) -> None:
    from gemray_kernels.triton.token_choice import TritonKernels

    shard = ShardIndices.of_rank(0, 1, org_vocab_size=262144)
    requests = [RowRequest(sampling_params(**kind), 9, 4, token_ids=[5] * 7, draft_ids=[1, 2]) for kind in kinds]
    logits_RV = torch.zeros(len(kinds), 262144)
    found = compile_launches(
        lambda: choose_rows(logits_RV, requests, shard, SoloCommunicator(), kernels=TritonKernels(), softcap=softcap)
    )
    if softcap is not None and "best_kernel" not in names:
        names = ["edit_kernel", *names]
    assert [kernel.name for kernel in found] == names
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, f"{kernel.name} spills {kernel.stack_bytes} bytes of registers"
