"""Names of the hub become directories of the local cache, on every node the same commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from gemray_workers.checkpoint.hub import NotInCache, find_in_cache, is_hub_name, on_this_node, snapshot_of
from gemray_workers.config import EngineConfig
from gemray_workers.rank.process import ProcessLocation
from gemray_workers.rank.worker import RankWorker
from support.checkpoints.hub_cache import add_to_cache

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text("{}")
    add_to_cache(tmp_path / "hub", "google/gemma-4-e2b", OLD, files, ref="v1")
    add_to_cache(tmp_path / "hub", "google/gemma-4-e2b", NEW, files)
    return tmp_path / "hub"


@pytest.mark.parametrize(("revision", "commit"), [("", NEW), ("@v1", OLD), (f"@{OLD}", OLD)])
def test_a_name_is_a_snapshot(cache: Path, revision: str, commit: str) -> None:
    found = find_in_cache(f"google/gemma-4-e2b{revision}")
    assert Path(found).parent.parent.parent == cache
    snapshot = snapshot_of(found)
    assert snapshot is not None
    assert (snapshot.repo, snapshot.commit) == ("google/gemma-4-e2b", commit)
    assert snapshot.download == f"hf download google/gemma-4-e2b --revision {commit}"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("google/other", "`hf download google/other`"),
        ("google/gemma-4-e2b@v9", "`hf download google/gemma-4-e2b --revision v9`"),
        ("google/.bad.", "ORG/NAME"),
    ],
)
def test_what_is_not_there_comes_with_the_command_that_brings_it(cache: Path, name: str, command: str) -> None:
    with pytest.raises(NotInCache) as caught:
        find_in_cache(name)
    assert command in str(caught.value)
    assert "download" not in command or str(cache) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gogle/gemma-4-31B-it", "; did you mean google/gemma-4-31B-it?"),
        ("google/gemma-4-31b-it", "; did you mean google/gemma-4-31B-it?"),
        ("google/gema-4-e2b@v9", "; did you mean google/gemma-4-e2b, which is there?"),
        ("google/gemma-4-31B-it", ""),
        ("google/gemma-4-31B-it-qat-w4a16-ct", ""),
        ("nvidia/gemma-4-31b-it-nvfp4", "; did you mean nvidia/Gemma-4-31B-IT-NVFP4?"),
        ("google/gemma-4-e2b@v9", ""),
        ("mistralai/Mistral-7B-v0.1", ""),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_misspelt_name_comes_with_the_one_that_is_probably_meant(name: str, hint: str) -> None:
    with pytest.raises(NotInCache) as caught:
        find_in_cache(name)
    assert str(caught.value).endswith(f"where a model asks for consent){hint}")


def test_what_is_on_the_disk_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("google/gemma")
    (tmp_path / "google" / "gemma").mkdir(parents=True)
    assert not is_hub_name("google/gemma")
    assert [name for name in ("gemma", "/google/gemma", "a/b/c", "../gemma", "google/", "") if is_hub_name(name)] == []


def test_a_rank_finds_the_commit_in_the_cache_of_its_node(cache: Path) -> None:
    elsewhere = f"/on/the/coordinator/hub/models--google--gemma-4-e2b/snapshots/{OLD}"
    here_ = str(cache / "models--google--gemma-4-e2b" / "snapshots" / OLD)
    assert on_this_node(elsewhere) == here_
    config = EngineConfig(
        model_path=elsewhere, drafter_path=elsewhere, tensor_parallel_size=1, dtype="float32", device="cpu",
        kv_memory_bytes=1,
    )  # fmt: skip
    told = RankWorker(config, 0, lambda _: ProcessLocation("n", "127.0.0.1", gpu=None))._config
    assert (told.model_path, told.drafter_path) == (here_, here_)
    assert told.hf_configs is config.hf_configs


@pytest.mark.parametrize(
    "path", ["/models/gemma", "/x/models--google--none/snapshots/" + OLD, "/x/models--google--none/blobs/" + OLD]
)
def test_other_directories_stay_as_they_are(cache: Path, path: str) -> None:
    assert on_this_node(path) == path
