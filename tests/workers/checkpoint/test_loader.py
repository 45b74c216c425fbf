"""The checkpoint loader: right bytes in the right place."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_workers.checkpoint import loader
from gemray_workers.checkpoint.index import SINGLE_FILE
from gemray_workers.checkpoint.progress import progress_bar
from gemray_workers.checkpoint.target import Copy, WeightTarget
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
)
from support.hypothesis_settings import FIXTURE_SERVES_ALL

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


@settings(suppress_health_check=FIXTURE_SERVES_ALL, max_examples=60)
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


@pytest.mark.parametrize("rows", [slice(0, 100), slice(10, 90)])
def test_large_tensors_move_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: slice) -> None:
    stored = random_tensor(100, 10)  # 20 bytes a row
    write_single(tmp_path, {PREFIX + "w": stored})
    monkeypatch.setattr(loader, "BLOCK_BYTES", 70)
    calls: list[int] = []
    count = rows.stop - rows.start
    destination = torch.zeros(count, 10)
    target = WeightTarget("w", (100, 10), (Copy((rows, slice(0, 10)), destination),))
    load(tmp_path, [target], progress=lambda done, total: calls.append(done))
    assert calls == [*(60 * i for i in range(1, count // 3 + 1)), 20 * count]
    assert torch.equal(destination, stored[rows].float())


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
