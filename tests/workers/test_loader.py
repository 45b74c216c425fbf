"""The checkpoint loader: right bytes in the right place, and every unsound checkpoint refused by name before a copy."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from gemray_workers.checkpoint import loader
from gemray_workers.checkpoint.index import INDEX_FILE, SINGLE_FILE, read_index
from gemray_workers.checkpoint.loader import LoadReport, ProgressFn, load_weights
from gemray_workers.checkpoint.progress import progress_bar
from gemray_workers.checkpoint.target import Copy, WeightTarget
from gemray_workers.errors import CheckpointError

PREFIX = "model.language_model."
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def write_single(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / SINGLE_FILE)


def write_shards(directory: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    write_weight_map(directory, {name: file for file, tensors in shards.items() for name in tensors})


def write_weight_map(directory: Path, weight_map: object) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(name: str, destination: Tensor) -> WeightTarget:
    shape = tuple(destination.shape)
    return WeightTarget(name, shape, (Copy(tuple(slice(0, size) for size in shape), destination),))


def refuse_all(name: str) -> bool:
    return False


def load(
    directory: Path,
    targets: list[WeightTarget],
    is_ignored: Callable[[str], bool] = refuse_all,
    progress: ProgressFn | None = None,
) -> LoadReport:
    return load_weights(directory, targets, prefix=PREFIX, is_ignored=is_ignored, progress=progress)


def refusal(directory: Path, targets: list[WeightTarget], is_ignored: Callable[[str], bool] = refuse_all) -> str:
    """The error's message; asserts that no destination was touched."""
    destinations = [copy.destination for target in targets for copy in target.copies]
    before = [destination.clone() for destination in destinations]
    with pytest.raises(CheckpointError) as error:
        load(directory, targets, is_ignored)
    assert all(torch.equal(d, b) for d, b in zip(destinations, before, strict=True))
    return str(error.value)


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("disk_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_casts_to_the_destination(tmp_path: Path, disk_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    stored = random_tensor(5, 7, dtype=disk_dtype)
    write_single(tmp_path, {PREFIX + "w": stored})
    destination = torch.zeros(5, 7, dtype=target_dtype)
    report = load(tmp_path, [whole("w", destination)])
    assert torch.equal(destination, stored.to(target_dtype))
    assert (report.tensors, report.bytes_read, report.ignored) == (1, stored.nbytes, ())
    assert report.seconds >= 0


def test_shards_parameters_scalars_and_integers(tmp_path: Path) -> None:
    stored = {
        "embed.weight": random_tensor(9, 4),
        "layers.0.layer_scalar": torch.tensor([0.25]),
        "scale": torch.tensor(3.0),
        "token_ordering": torch.arange(6),
        "empty": torch.zeros(0, 4),
    }
    first = {PREFIX + name: stored[name] for name in ("embed.weight", "scale", "empty")}
    second = {PREFIX + name: stored[name] for name in ("layers.0.layer_scalar", "token_ordering")}
    write_shards(tmp_path, {FIRST: first, SECOND: second})
    parameter = torch.nn.Parameter(torch.zeros(9, 4))  # a leaf that requires grad
    destinations = {
        "token_ordering": torch.zeros(6, dtype=torch.int64),
        "embed.weight": parameter,
        "scale": torch.zeros(()),
        "layers.0.layer_scalar": torch.zeros(1),
        "empty": torch.zeros(0, 4),
    }
    report = load(tmp_path, [whole(name, destination) for name, destination in destinations.items()])
    for name, destination in destinations.items():
        assert torch.equal(destination.detach(), stored[name].to(destination.dtype)), name
    assert parameter.grad_fn is None
    assert report.tensors == 5
    assert report.bytes_read == sum(tensor.nbytes for tensor in stored.values())


def test_one_tensor_into_several_places(tmp_path: Path) -> None:
    """Gate and up halves of an expert matrix, each split by rows, side by side in one parameter."""
    stored = random_tensor(3, 8, 5)
    write_single(tmp_path, {PREFIX + "experts.gate_up_proj": stored})
    shard = torch.zeros(3, 4, 5)
    copies = tuple(
        Copy((slice(0, 3), slice(start, start + 2), slice(0, 5)), shard[:, at : at + 2])
        for start, at in [(2, 0), (6, 2)]
    )
    report = load(tmp_path, [WeightTarget("experts.gate_up_proj", (3, 8, 5), copies)])
    assert torch.equal(shard, stored[:, [2, 3, 6, 7]].float())
    assert report.bytes_read == 3 * 4 * 5 * 2


def test_a_target_without_copies_is_checked_and_not_read(tmp_path: Path) -> None:
    write_single(tmp_path, {PREFIX + "table": random_tensor(64, 64), PREFIX + "norm": random_tensor(4)})
    norm = torch.zeros(4)
    report = load(tmp_path, [WeightTarget("table", (64, 64), ()), whole("norm", norm)])
    assert (report.tensors, report.bytes_read) == (2, 8)
    assert "table has shape [64, 64], the model needs [64, 63]" in refusal(
        tmp_path, [WeightTarget("table", (64, 63), ()), whole("norm", norm)]
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_any_block_through_any_block_size(tmp_path: Path, data: st.DataObject) -> None:
    """A random block of a random tensor, copied in blocks of any size into a strided view: equal to plain slicing."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), "shape")
    source = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        source.append(slice(start, data.draw(st.integers(start, size))))
    stored = random_tensor(*shape, dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32])))
    write_single(tmp_path, {PREFIX + "w": stored})
    expected = stored[tuple(source)].double()
    destination = torch.full([2 * size for size in expected.shape], -7.0, dtype=torch.float64)
    view = destination[tuple(slice(0, None, 2) for _ in shape)]
    calls: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "BLOCK_BYTES", data.draw(st.integers(1, 64), "block bytes"))
        report = load(
            tmp_path,
            [WeightTarget("w", tuple(shape), (Copy(tuple(source), view),))],
            progress=lambda done, total: calls.append((done, total)),
        )
    assert torch.equal(view, expected)
    assert (destination == -7.0).sum() >= destination.numel() - view.numel()
    assert report.bytes_read == expected.numel() * stored.itemsize
    assert calls == sorted(calls)
    assert all(total == report.bytes_read for _, total in calls)
    if calls:
        assert calls[-1][0] == report.bytes_read


def test_large_tensors_move_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_tensor(100, 10)  # 20 bytes a row
    write_single(tmp_path, {PREFIX + "w": stored})
    monkeypatch.setattr(loader, "BLOCK_BYTES", 70)
    calls: list[int] = []
    destination = torch.zeros(100, 10)
    load(tmp_path, [whole("w", destination)], progress=lambda done, total: calls.append(done))
    assert calls == [60 * i for i in range(1, 34)] + [2000]
    assert torch.equal(destination, stored.float())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_read_their_part_only(tmp_path: Path, size: int) -> None:
    rows, columns = random_tensor(8, 6), random_tensor(6, 8)
    write_single(tmp_path, {PREFIX + "column_parallel": rows, PREFIX + "row_parallel": columns})
    parts = []
    for rank in range(size):
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        mine = torch.zeros(8 // size, 6, dtype=torch.float64), torch.zeros(6, 8 // size, dtype=torch.float64)
        report = load(
            tmp_path,
            [
                WeightTarget("column_parallel", (8, 6), (Copy((part, slice(0, 6)), mine[0]),)),
                WeightTarget("row_parallel", (6, 8), (Copy((slice(0, 6), part), mine[1]),)),
            ],
        )
        assert report.bytes_read == (rows.nbytes + columns.nbytes) // size
        parts.append(mine)
    assert torch.equal(torch.cat([part[0] for part in parts]), rows.double())
    assert torch.equal(torch.cat([part[1] for part in parts], dim=1), columns.double())


def test_ignored_names_are_judged_in_full_and_reported(tmp_path: Path) -> None:
    asked: list[str] = []

    def is_ignored(name: str) -> bool:
        asked.append(name)
        return name.startswith("model.vision_tower.") or name == PREFIX + "layers.9.self_attn.k_proj.weight"

    dead = ["model.vision_tower.patch.weight", PREFIX + "layers.9.self_attn.k_proj.weight"]
    write_single(tmp_path, {name: random_tensor(2) for name in [*dead, PREFIX + "norm.weight"]})
    report = load(tmp_path, [whole("norm.weight", torch.zeros(2))], is_ignored)
    assert report.ignored == tuple(sorted(dead))
    assert sorted(asked) == sorted(dead)  # a target is never asked about


def test_a_name_under_another_prefix_is_no_target(tmp_path: Path) -> None:
    write_single(
        tmp_path, {PREFIX + "norm.weight": random_tensor(2), "model.audio_tower.norm.weight": random_tensor(2)}
    )
    message = refusal(tmp_path, [whole("norm.weight", torch.zeros(2))])
    assert "unexpected tensors: model.audio_tower.norm.weight" in message


def test_shards_may_be_links(tmp_path: Path) -> None:
    """A hub cache keeps a snapshot as links to its blobs."""
    stored = random_tensor(3)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_single(blobs, {PREFIX + "w": stored})
    (snapshot / SINGLE_FILE).symlink_to(blobs / SINGLE_FILE)
    destination = torch.zeros(3)
    load(snapshot, [whole("w", destination)])
    assert torch.equal(destination, stored.float())


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
        lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    ],
    ids=["longer", "header length", "header", "pointer file"],
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


# --- progress bar -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_on_rank_0_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    write_single(tmp_path, {PREFIX + "w": random_tensor(1 << 10, 1 << 10)})
    terminal = Terminal()
    with progress_bar("Loading weights", rank=0, stream=terminal) as progress:
        assert progress is not None
        load(tmp_path, [whole("w", torch.zeros(1 << 10, 1 << 10))], progress=progress)
    assert "Loading weights" in terminal.getvalue()
    assert "2.0/2.0 MiB" in terminal.getvalue()


@pytest.mark.parametrize(("rank", "stream"), [(1, Terminal()), (0, io.StringIO())], ids=["other rank", "no terminal"])
def test_the_bar_is_not_drawn_elsewhere(rank: int, stream: io.StringIO) -> None:
    with progress_bar("Loading weights", rank=rank, stream=stream) as progress:
        assert progress is None
    assert stream.getvalue() == ""
