"""The checkpoint loader: every unsound or unfit checkpoint is refused by name before a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemray_workers.checkpoint.index import INDEX_FILE, SINGLE_FILE, read_index
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.errors import CheckpointError
from support.checkpoints.weight_files import (
    FIRST,
    PREFIX,
    SECOND,
    load,
    random_tensor,
    refusal,
    whole,
    write_shards,
    write_single,
    write_weight_map,
)

# --- what does not fit the model --------------------------------------------------------------------------------------


def test_all_misfits_are_listed_at_once(tmp_path: Path) -> None:
    write_single(
        tmp_path,
        {
            PREFIX + "good": random_tensor(2),
            PREFIX + "layers.0.q": random_tensor(4, 2),
            PREFIX + "layers.0.k_scale": random_tensor(1),
            "model.vision_tower.x": random_tensor(1),
            "lm_head.weight": random_tensor(3),
        },
    )
    targets = [
        whole("good", torch.zeros(2)),
        whole("good", torch.ones(2)),
        whole("layers.0.q", torch.zeros(2, 4)),
        whole("layers.1.q", torch.zeros(2, 4)),
        whole("layers.1.v", torch.zeros(2, 4)),
    ]
    message = refusal(tmp_path, targets, lambda name: "vision_tower" in name)
    assert message.splitlines() == [
        f"{tmp_path} does not fit the model:",
        f"  {PREFIX}layers.0.q has shape [4, 2], the model needs [2, 4]",
        f"  missing tensors: {PREFIX}layers.1.q, {PREFIX}layers.1.v",
        f"  unexpected tensors: lm_head.weight, {PREFIX}layers.0.k_scale",
        f"  tensors targeted twice: {PREFIX}good",
    ]


@pytest.mark.parametrize("codes", ["weight_packed", "weight"])
def test_plain_layers_that_a_config_says_are_packed_are_told_first(tmp_path: Path, codes: str) -> None:
    """As beside a config that was copied from a quantized checkpoint, or that a merge has left behind."""
    stored = {f"{PREFIX}layers.{i}.q.weight": random_tensor(4, 16).to(torch.bfloat16) for i in range(2)}
    write_single(tmp_path, stored)
    targets = [
        WeightTarget(f"layers.{i}.q.{codes}", (4, 2), (), role="codes", format="int4 group 32") for i in range(2)
    ]
    assert refusal(tmp_path, targets).splitlines()[1] == (
        f"  2 of 2 layers that the quantization config says are packed are plain: {PREFIX}layers.0.q.weight is stored "
        "as BF16, not as int4 group 32; remove that config, or list them as ignored in it"
    )


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    write_single(tmp_path, {PREFIX + "w": random_tensor(1)})
    targets = [whole("w", torch.zeros(1))] + [whole(f"layers.{i:02}.q", torch.zeros(1)) for i in range(25)]
    message = refusal(tmp_path, targets)
    assert f"{PREFIX}layers.00.q, " in message
    assert message.endswith(f"{PREFIX}layers.19.q and 5 more")


@pytest.mark.parametrize(
    ("stored", "destination", "message"),
    [
        (torch.arange(3), torch.zeros(3), "w is stored as I64, the model keeps it as torch.float32"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), "w is stored as F32, the model keeps it as torch.int64"),
        (torch.zeros(3).to(torch.float8_e4m3fn), torch.zeros(3), "w is stored as F8_E4M3; allowed: F64, F32, F16"),
    ],
    ids=["integers", "floats", "quantised"],
)
def test_a_cast_that_would_change_the_meaning_is_refused(
    tmp_path: Path, stored: Tensor, destination: Tensor, message: str
) -> None:
    write_single(tmp_path, {PREFIX + "w": stored})
    assert message in refusal(tmp_path, [whole("w", destination)])


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ((slice(0, 4), slice(0, 2)), (1, 2)),
        ((slice(0, 1), slice(0, 2)), (4, 2)),  # copy_ would broadcast this one
        ((slice(2, 5), slice(0, 2)), (3, 2)),
        ((slice(-1, 3), slice(0, 2)), (4, 2)),
        ((slice(0, 4),), (4,)),
    ],
)
def test_a_block_that_does_not_fill_its_destination(
    tmp_path: Path, source: tuple[slice, ...], shape: tuple[int, ...]
) -> None:
    write_single(tmp_path, {PREFIX + "w": random_tensor(4, 2)})
    target = WeightTarget("w", (4, 2), (Copy(source, torch.zeros(shape)),))
    assert f"{PREFIX}w: block [{source[0].start}:{source[0].stop}" in refusal(tmp_path, [target])


# --- weights that are no numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_number_that_is_none_is_told_by_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, stored: torch.dtype
) -> None:
    monkeypatch.setattr("gemray_workers.checkpoint.loader.BLOCK_BYTES", 64)
    spoilt = random_tensor(40, 8).to(stored)
    spoilt[33, 5] = value
    write_single(tmp_path, {PREFIX + "fine": random_tensor(4), PREFIX + "w": spoilt})
    targets = [whole("fine", torch.zeros(4)), whole("w", torch.zeros(40, 8, dtype=torch.bfloat16))]
    told = rf"^{PREFIX}w is damaged: 1 of (16|32) weights that were read are NaN or infinite$"
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path, targets)


def test_what_is_damaged_on_another_rank_is_that_ranks_to_tell(tmp_path: Path) -> None:
    spoilt = random_tensor(4, 2)
    spoilt[3, 0] = float("nan")
    write_single(tmp_path, {PREFIX + "w": spoilt})
    part = Copy((slice(0, 2), slice(0, 2)), torch.zeros(2, 2))
    load(tmp_path, [WeightTarget("w", (4, 2), (part,))])
    assert torch.equal(part.destination, spoilt[:2])


def test_large_numbers_are_numbers(tmp_path: Path) -> None:
    large = torch.full((8,), 3e38)
    write_single(tmp_path, {PREFIX + "w": large})
    into = torch.zeros(8)
    load(tmp_path, [whole("w", into)])
    assert torch.equal(into, large)


# --- unsound checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_shards(
        tmp_path,
        {
            FIRST: {PREFIX + "a": random_tensor(8), PREFIX + "b": random_tensor(8)},
            SECOND: {PREFIX + "c": random_tensor(8)},
        },
    )
    return tmp_path


def targets_abc() -> list[WeightTarget]:
    return [whole(name, torch.zeros(8)) for name in "abc"]


def test_the_sound_one_loads(sharded: Path) -> None:
    assert load(sharded, targets_abc()).tensors == 3
    assert [tensor.name for tensor in read_index(sharded).tensors.values()] == [PREFIX + name for name in "abc"]


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    assert f"shards that the index names are missing: {SECOND}" in refusal(sharded, targets_abc())


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1], ids=lambda keep: f"{keep} bytes")
def test_a_truncated_shard(sharded: Path, keep: int) -> None:
    content = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(content[:keep])
    size = len(content[:keep])
    assert f"{SECOND} is truncated or corrupt ({size} bytes): " in refusal(sharded, targets_abc())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content + b"more",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"[" + content[9:],
    ],
    ids=["longer", "header length", "header"],
)
def test_a_corrupt_shard(sharded: Path, spoil: Callable[[bytes], bytes]) -> None:
    (sharded / FIRST).write_bytes(spoil((sharded / FIRST).read_bytes()))
    assert f"{FIRST} is truncated or corrupt (" in refusal(sharded, targets_abc())


def test_a_tensor_in_two_files(sharded: Path) -> None:
    save_file({PREFIX + "c": random_tensor(8), PREFIX + "b": random_tensor(8)}, sharded / SECOND)
    assert f"{PREFIX}b is in two files: {FIRST} and {SECOND}" in refusal(sharded, targets_abc())


def test_the_index_promises_too_much(sharded: Path) -> None:
    write_weight_map(sharded, {PREFIX + "a": FIRST, PREFIX + "b": FIRST, PREFIX + "c": SECOND, PREFIX + "d": SECOND})
    expected = f"the index promises tensors that {SECOND} does not hold: {PREFIX}d"
    assert expected in refusal(sharded, targets_abc())


def test_the_index_forgets_a_tensor(sharded: Path) -> None:
    write_weight_map(sharded, {PREFIX + "a": FIRST, PREFIX + "c": SECOND})
    assert f"{FIRST} holds tensors that the index does not name: {PREFIX}b" in refusal(sharded, targets_abc())


def test_several_faults_are_told_together(sharded: Path) -> None:
    (sharded / FIRST).write_bytes(b"")
    (sharded / SECOND).unlink()
    message = refusal(sharded, targets_abc())
    assert f"{FIRST} is truncated or corrupt (0 bytes)" in message
    assert f"missing: {SECOND}" in message


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        (None, "has no weight_map"),
        ({"w": "../elsewhere.safetensors"}, "weight_map puts w in '../elsewhere.safetensors'"),
        ({"w": "pytorch_model.bin"}, "weight_map puts w in 'pytorch_model.bin'"),
        ({"w": 3}, "weight_map puts w in 3"),
    ],
)
def test_a_malformed_weight_map(tmp_path: Path, weight_map: object, message: str) -> None:
    write_weight_map(tmp_path, weight_map)
    assert message in refusal(tmp_path, [])


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text("{")
    assert f"{tmp_path / INDEX_FILE} is not readable JSON" in refusal(tmp_path, [])


def test_a_single_file_beside_an_index_that_does_not_name_it(sharded: Path) -> None:
    shutil.copy(sharded / SECOND, sharded / SINGLE_FILE)
    assert f"holds both {SINGLE_FILE} and {INDEX_FILE}" in refusal(sharded, targets_abc())


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    write_shards(tmp_path, {SINGLE_FILE: {PREFIX + "w": random_tensor(2)}})
    assert load(tmp_path, [whole("w", torch.zeros(2))]).tensors == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "(it holds: nothing)"),
        (["config.json"], "(it holds: config.json)"),
        (["pytorch_model.bin"], "only PyTorch pickles (pytorch_model.bin): convert them to safetensors"),
        ([FIRST, SECOND], f"though it holds {FIRST}, {SECOND}: the index is missing"),
    ],
)
def test_a_directory_without_a_checkpoint(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"{}")
    refused = refusal(tmp_path, [])
    assert f"{tmp_path} holds neither {SINGLE_FILE} nor {INDEX_FILE}" in refused
    assert message in refused


def test_a_directory_that_is_absent_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        assert f"{tmp_path / name} is not a directory" in refusal(tmp_path / name, [])
