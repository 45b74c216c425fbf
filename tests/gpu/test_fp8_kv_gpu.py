"""A KV cache of 8-bit floats on a GPU: kernels against float64, the embedded family beside the CPU, ids with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference import paged_attention as reference
from gemray_workers.config import DeviceName, DTypeName, KVDTypeName
from gemray_workers.embedded import EmbeddedName
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import Shape
from support.engine.embedded_devices import DRAFTERS, compare, family_run, texts
from support.engine.engine_runner import Run, request
from support.engine.gpu import needs_gpus, published_config, run_on_gpus
from support.engine.held_out_requests import held_out_requests
from support.engine.near_ties import partings, told
from support.kernels.kernel_parity import AttentionCase, fp8_bytes_that_differ

pytestmark = pytest.mark.gpu

KERNEL_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
LENGTHS = {
    "decode": [(1, 1), (1, 17), (1, 4000), (1, 513), (1, 1024)],
    "verify": [(5, 700), (17, 2049), (16, 16), (1, 130), (9, 3000)],
    "many rows": [(5, 300 + 7 * i) for i in range(24)],
    "mixed": [(300, 1500), (1, 600), (5, 90), (33, 33), (64, 1100), (32, 640)],
}
GROUPS = {
    "31B sliding": (32, 16, 256, 1024),
    "31B full": (32, 4, 512, None),
    "26B-A4B full": (16, 2, 512, None),
    "E2B sliding": (8, 1, 256, 512),
}
NOISE: dict[DTypeName, float] = {"float32": 0.75, "bfloat16": 1.2}
"""Most by which a token's nats may differ from the CPU's, on average, in parts of what 8-bit pages change on the CPU. A
sum that is taken in another order moves a number near the middle between two of the format's by a whole step, which
later layers multiply, so texts part at no small gap, and single tokens tell nothing. On a CPU float64 beside float32 is
0.09 parts apart, bfloat16 0.86; keys of a scale that is wrong by a tenth are 1.3 (2026-11-29)."""
LOSS = 0.015
"""Most nats by which the mean may differ. Keys of a scale that is wrong by a tenth cost 0.033. The norm behind
attention divides a wrong scale of the values out: what holds that one are the kernels' tests above."""
FAMILY_ACCEPTANCE = 0.05
"""Most by which tokens a round may differ, relatively."""
NEAR_TIE = {"31B": 0.1, "E2B": 0.1}
"""Most nats between two tokens where random weights' texts part; their logits spread by about 0.25."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("group", GROUPS)
def test_attention_reads_what_the_pages_say(group: str, lengths: str, dtype: torch.dtype) -> None:
    from gemray_kernels.triton.paged_attention import paged_attention

    heads, kv_heads, head_dim, window = GROUPS[group]
    case = AttentionCase(LENGTHS[lengths], heads, kv_heads, head_dim, window=window)
    error = case.fp8_error(paged_attention, dtype, "cuda", seed=len(lengths))
    assert error < KERNEL_TOLERANCE[dtype], error


def test_the_reference_reads_them_on_a_card_too() -> None:
    case = AttentionCase(LENGTHS["verify"], 16, 2, 512)
    assert case.fp8_error(reference.paged_attention, torch.bfloat16, "cuda", seed=1) < KERNEL_TOLERANCE[torch.bfloat16]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same bits alone and in a batch."""
    from gemray_kernels.fp8_kv import to_fp8
    from gemray_kernels.triton.paged_attention import paged_attention

    case = AttentionCase([(5, 3000), (5, 90), (5, 1024), (5, 17), (5, 2500)], 32, 4, 512)
    q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S = case.batch(torch.bfloat16, "cuda", seed=5)
    pages = to_fp8(k_pages, 0.01), to_fp8(v_pages, 0.02)
    attend = partial(paged_attention, window=None, causal=True, scale=1.0, k_scale=0.01, v_scale=0.02)
    together = attend(q_TND, *pages, table_SP, start_Z, kv_len_S)
    for s in range(5):
        rows = slice(5 * s, 5 * s + 5)
        alone = attend(q_TND[rows], *pages, table_SP[s : s + 1], start_Z[:2], kv_len_S[s : s + 1])
        assert torch.equal(alone, together[rows])


def test_pages_hold_the_references_bytes() -> None:
    """All but those few whose number, summed in another order, comes to lie on the other side of a middle."""
    from gemray_kernels.table import triton_kernels

    found = fp8_bytes_that_differ(triton_kernels(), "cuda")
    assert len(found) == 4
    assert {kind: count for kind, count in found.items() if count > 10} == {}, found


@cache
def family_on_cpu(drafter: EmbeddedName) -> Run:
    return family_run(drafter, "cpu", "float32", texts(48, 48), kv_dtype="fp8_e4m3")


@cache
def nats(device: DeviceName, dtype: DTypeName, kv_dtype: KVDTypeName) -> Tensor:
    """Nats of each token of 48 held-out prompts."""
    submits = held_out_requests(48, 1, prompt_logprobs=0)
    run = family_run(None, device, dtype, submits, kv_dtype=kv_dtype)
    deltas = [delta for result in run.results.values() for delta in result.deltas]
    return torch.tensor([-entry.logprob for delta in deltas for entry in delta.prompt_logprobs or []])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_family_loses_what_it_loses_on_a_cpu(
    dtype: DTypeName, record_property: Callable[[str, object], None]
) -> None:
    needs_gpus(1)
    plain, on_cpu = nats("cpu", "float32", "auto"), nats("cpu", "float32", "fp8_e4m3")
    on_gpu = nats("cuda", dtype, "fp8_e4m3")
    assert plain.shape == on_cpu.shape == on_gpu.shape
    noise, apart = ((x - on_cpu).abs().mean().item() for x in (plain, on_gpu))
    more = (on_gpu.mean() - on_cpu.mean()).item()
    line = f"fp8 KV, {dtype}: {apart:.4f} nats a token apart from the CPU, pages alone {noise:.4f}; mean {more:+.4f}"
    record_property("nats", line)
    print(line)
    assert apart < NOISE[dtype] * noise, line
    assert abs(more) < LOSS, line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters_get_as_far_as_on_a_cpu(
    drafter: EmbeddedName, dtype: DTypeName, record_property: Callable[[str, object], None]
) -> None:
    needs_gpus(1)
    on_gpu = family_run(drafter, "cuda", dtype, texts(48, 48), kv_dtype="fp8_e4m3")
    found = compare(f"fp8 KV, {drafter}, {dtype} on a GPU, float32 on CPU", family_on_cpu(drafter), on_gpu)
    record_property("embedded", found.line)
    print(found.line)
    assert found.acceptance_differs_by < FAMILY_ACCEPTANCE, found.line


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@cache
def served(shape: Shape, method: str, directory: Path, lengths: Sequence[int]) -> Run:
    """Random weights, captured graphs, prompts of these lengths; the longer ones cross the windows."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 262144, (length,), generator=generator).tolist() for length in lengths]
    submits = [request(f"r{i}", prompt, 32, logprobs=20) for i, prompt in enumerate(prompts)]
    config = published_config(
        shape, method, directory, kv_dtype="fp8_e4m3", max_model_len=1600, max_num_seqs=len(lengths), prefill_chunk=256
    )
    run = run_on_gpus(SoloCommunicator(), config, submits)
    torch.cuda.empty_cache()
    assert run is not None
    return run


@pytest.mark.parametrize("method", ["mtp", "dflash"])
@pytest.mark.parametrize("shape", ["31B", "E2B"])
def test_ids_with_drafts_part_at_near_ties_alone(
    shape: Shape, method: str, directory: Path, record_property: Callable[[str, object], None]
) -> None:
    if (shape, method) == ("E2B", "dflash"):
        pytest.skip("no such drafter is published")
    needs_gpus(1)
    lengths = (1, 6, 21, 36, 505, 1020, 1500)
    plain, other = (served(shape, name, directory, lengths) for name in ("none", method))
    line = told(f"fp8 KV, {shape}, {method}", plain, other)
    record_property("near_ties", line)
    print(line)
    assert other.speculation.drafted
    assert all(parting.gap < NEAR_TIE[shape] for parting in partings(plain, other)), line
