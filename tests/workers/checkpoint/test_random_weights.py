"""Random weights instead of a checkpoint: every destination filled, the same whole tensors for any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gemray_workers.checkpoint.quantized.formats import fp8, modelopt_nvfp4, nvfp4, packed_int, plain_int8
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.random_weights import BLOCK_ELEMENTS, random_weights
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.errors import CheckpointError
from gemray_workers.model.packed_linear import packed_linear_weight
from gemray_workers.model.weight_sharding import Part, WeightSharding, sliced_tensor, whole_tensor
from gemray_workers.parallel.communicator import Communicator
from support.checkpoints.tiny import SHAPES, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, engine_config, request, run_engine
from support.processes.gang import RunOnGang


def fill(*targets: WeightTarget) -> None:
    random_weights("unread", targets, prefix="model.", is_ignored=lambda _name: False)


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    destination = torch.full(shape, torch.nan, dtype=dtype)
    fill(whole_tensor(name, destination))
    return destination


def test_scale_follows_the_kind_of_tensor() -> None:
    matrix = whole("layers.0.mlp.up_proj.weight", 300, 400)
    assert matrix.std().item() == pytest.approx(400**-0.5, rel=0.02)
    assert abs(matrix.mean().item()) < 1e-3
    norm = whole("norm.weight", 4000)
    assert norm.mean().item() == pytest.approx(1.0, abs=0.01)
    assert norm.std().item() == pytest.approx(0.1, rel=0.1)
    experts = whole("layers.0.experts.down_proj", 3, 50, 64)
    assert experts.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert not torch.equal(experts[0], experts[1])


def test_tensors_differ_by_name_and_equal_themselves() -> None:
    assert torch.equal(whole("a.weight", 5, 6), whole("a.weight", 5, 6))
    assert not torch.equal(whole("a.weight", 5, 6), whole("b.weight", 5, 6))
    wide, narrow = whole("a.weight", 5, 6, dtype=torch.float64), whole("a.weight", 5, 6, dtype=torch.bfloat16)
    assert torch.equal(wide.to(torch.bfloat16), narrow)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_hold_slices_of_one_tensor(dim: int, num_ranks: int) -> None:
    shape = (8, 12, 16)
    tensor = whole("layers.0.experts.gate_up_proj", *shape)
    local = shape[dim] // num_ranks
    parts = []
    for rank in range(num_ranks):
        part = torch.full([local if d == dim else n for d, n in enumerate(shape)], torch.nan)
        fill(sliced_tensor("layers.0.experts.gate_up_proj", dim, Part(rank * local, local, shape[dim]), part))
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=dim), tensor)


def test_a_tensor_of_several_blocks_is_filled_from_any_row() -> None:
    width = 1 << 14
    rows = 2 * (BLOCK_ELEMENTS // width) + 3
    tensor = whole("embed_tokens.weight", rows, width)
    assert tensor.isfinite().all()
    first = BLOCK_ELEMENTS // width - 2
    part = torch.full((5, width), torch.nan)
    source = (slice(first, first + 5), slice(0, width))
    fill(WeightTarget("embed_tokens.weight", (rows, width), (Copy(source, part),)))
    assert torch.equal(part, tensor[first : first + 5])
    assert not torch.equal(tensor[0], tensor[BLOCK_ELEMENTS // width])


def test_integers_are_a_permutation_and_scalars_are_filled() -> None:
    ordering, scalar = torch.zeros(50, dtype=torch.int64), torch.tensor(torch.nan)
    fill(whole_tensor("token_ordering", ordering), whole_tensor("layer_scalar", scalar))
    assert sorted(ordering.tolist()) == list(range(50))
    assert ordering.tolist() != list(range(50))
    assert scalar.item() == pytest.approx(1.0, abs=0.6)


@pytest.fixture
def shape_only(tmp_path: Path) -> Path:
    """A directory with a config and nothing else."""
    shutil.copy(tiny_checkpoint("31B") / "config.json", tmp_path)
    return tmp_path


def ids(comm: Communicator, model: str, tp: int, drafter: str | None = None) -> Run | None:
    config = engine_config(model, tensor_parallel_size=tp, drafter_path=drafter, random_weights=True)
    return run_engine(comm, config, [request("a", [5, 9, 2], 12), request("b", [7] * 20, 12, temperature=1.0)])


def test_an_engine_needs_only_configs(run_on_gang: RunOnGang, shape_only: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds neither"):
        run_engine_with_files(shape_only)
    plain = run_on_gang(1, ids, str(shape_only), 1)[0].ids
    assert len(set(plain["a"])) > 3, "random weights that repeat one token show nothing"
    assert run_on_gang(2, ids, str(shape_only), 2)[0].ids == plain
    for drafter in (tiny_assistant(tiny_checkpoint("31B")), tiny_dflash(tiny_checkpoint("31B"))):
        config_only = tmp_path / drafter.name
        config_only.mkdir()
        shutil.copy(drafter / "config.json", config_only)
        assert run_on_gang(1, ids, str(shape_only), 1, str(config_only))[0].ids == plain


def run_engine_with_files(model: Path) -> None:
    from gemray_workers.parallel.communicator import SoloCommunicator

    run_engine(SoloCommunicator(), engine_config(model), [request("a", [5], 2)])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_usable_logits(shape: Shape) -> None:
    from gemray_workers.parallel.communicator import SoloCommunicator

    run = ids(SoloCommunicator(), str(tiny_checkpoint(shape)), 1)
    assert run is not None
    assert [len(tokens) for tokens in run.ids.values()] == [12, 12]
    assert all(result.last.fault is None for result in run.results.values())


FORMATS = {
    "int4": packed_int(4, 32, None),
    "int8": plain_int8(None, 1, None),
    "fp8": fp8(None, None, None),
    "fp8 blocks": fp8(128, 128, None),
    "nvfp4": nvfp4(None),
    "nvfp4 (modelopt)": modelopt_nvfp4(None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_router_spreads_its_logits_as_a_plain_one_does(name: str) -> None:
    """Other packed layers, whose inputs are around 1 each, have outputs around 1, as plain ones have."""
    num_out, num_in = 128, 256
    recipe = Recipe(method="none", prefix="", targets=(), ignored=(), scale_dtypes={})
    sharding = WeightSharding(0, 1, torch.float32, torch.device("cpu"), recipe)
    x_TI = torch.randn(40, num_in, generator=torch.Generator().manual_seed(0))
    for layer, inputs_TI, spread in (
        ("layers.0.router.proj", x_TI / x_TI.norm(dim=-1, keepdim=True), 2.0),
        ("layers.0.mlp.up_proj", x_TI, 1.0),
    ):
        outputs = [(layer, Part(0, num_out, num_out))]
        packed = packed_linear_weight(recipe, FORMATS[name], outputs, Part(0, num_in, num_in), sharding)
        fill(*packed.weight_targets())
        assert packed.wide_summands(inputs_TI).sum(0).std().item() == pytest.approx(spread, rel=0.1)
        plain = whole(f"{layer}.weight", num_out, num_in)
        assert (inputs_TI @ plain.t()).std().item() == pytest.approx(spread, rel=0.1)
