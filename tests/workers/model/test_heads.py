"""Which table scores the tokens: the embedding, or a head of its own. transformers' rule, and its numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.checkpoint.loader import check_weights
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.errors import CheckpointError
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.heads import embedding_of, other_head, with_head, with_head_alone
from support.checkpoints.tiny import VOCAB_SIZE, WINDOW, Layout, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, serve
from support.oracles.gang_logits import logits_on_rank
from support.oracles.mtp_reference import draft_steps, hf_target, target_states
from support.oracles.mtp_steps import assert_equal_steps, engine_steps, load_assistant, random_text
from support.oracles.oracle import CPU, plain_generate, prompt_logits, solo_model
from support.processes.gang import RunOnGang

PROMPT = random_text(2 * WINDOW + 3, seed=4)
NEXT = 4


@torch.no_grad()
def difference_from_transformers(directory: Path) -> float:
    expected = hf_target(directory)(input_ids=torch.tensor([PROMPT])).logits[0]
    return (prompt_logits(solo_model(directory, torch.float32), PROMPT) - expected).abs().max().item()


@pytest.mark.parametrize("layout", ["conditional", "causal"])
@pytest.mark.parametrize(
    ("head", "tied", "is_own"),
    [
        ("other", False, True),
        ("other", True, True),
        ("equal", True, False),
        ("equal", False, True),
        (None, True, False),
    ],
)
def test_logits_are_those_of_transformers(
    head: str | None, tied: bool, is_own: bool, layout: Layout, tmp_path: Path
) -> None:
    source = tiny_checkpoint("31B", layout=layout)
    heads = {"other": other_head(source), "equal": embedding_of(source), None: None}
    directory = with_head(source, tmp_path / "model", heads[head], tied=tied)
    assert ModelConfig.from_directory(directory).has_own_head == is_own
    assert difference_from_transformers(directory) <= 2e-5
    changed = (prompt_logits(solo_model(directory), PROMPT) - prompt_logits(solo_model(source), PROMPT)).abs().max()
    assert (changed > 1) == (head == "other")


def test_a_head_that_differs_in_one_number_late_in_the_table_is_another(tmp_path: Path) -> None:
    source = tiny_checkpoint("31B", vocab_size=9000)
    head_VH = embedding_of(source).clone()
    head_VH[-1, -1] += 1e-6
    assert ModelConfig.from_directory(with_head(source, tmp_path / "model", head_VH)).has_own_head
    equal = with_head(source, tmp_path / "equal", embedding_of(source).double())
    assert not ModelConfig.from_directory(equal).has_own_head


def test_the_root_config_decides_not_the_text_config(tmp_path: Path) -> None:
    """As in transformers: the text config's own setting is not looked at."""
    directory = with_head(tiny_checkpoint("E2B"), tmp_path / "model", None, text_tied=False)
    assert not ModelConfig.from_directory(directory).has_own_head
    assert difference_from_transformers(directory) <= 2e-5


def test_an_untied_head_that_is_absent_is_named(tmp_path: Path) -> None:
    directory = with_head(tiny_checkpoint("31B"), tmp_path / "model", None, tied=False)
    config = ModelConfig.from_directory(directory)
    model = TargetModel(config, SoloCommunicator(), dtype=torch.float32, device=torch.device("meta"))
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        check_weights(directory, model.weight_targets(), prefix=config.weight_prefix, is_ignored=model.ignored_name)


@pytest.mark.parametrize("layout", ["conditional", "causal"])
def test_of_tied_tables_the_head_is_enough(layout: Layout, tmp_path: Path) -> None:
    """transformers ties the embedding to it; other tensors that are missing are still named."""
    source = tiny_checkpoint("31B", layout=layout)
    directory = with_head_alone(source, tmp_path / "model")
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        assert torch.equal(hf_target(directory)(input_ids=ids).logits, hf_target(source)(input_ids=ids).logits)
    config = ModelConfig.from_directory(directory)
    assert (config.vocab_size, config.has_own_head) == (VOCAB_SIZE, False)
    run = serve(EngineRank(engine_config(directory), SoloCommunicator(), CPU), SoloCommunicator(), [
        request("a", PROMPT, NEXT),
    ])  # fmt: skip
    assert run is not None
    assert run.ids["a"] == plain_generate(source, PROMPT, NEXT)
    untied = with_head(directory, tmp_path / "untied", None, tied=False)
    with pytest.raises(CheckpointError, match=r"missing tensors: model\..*embed_tokens\.weight"):
        EngineRank(engine_config(untied), SoloCommunicator(), CPU)


def test_an_assistant_with_the_head_alone_is_the_same(tmp_path: Path) -> None:
    directory = tiny_checkpoint("31B")
    drafter = with_head_alone(tiny_assistant(directory), tmp_path / "assistant")
    runs = []
    for path in (tiny_assistant(directory), drafter):
        rank = EngineRank(engine_config(directory, drafter_path=str(path)), SoloCommunicator(), CPU)
        runs.append(serve(rank, SoloCommunicator(), [request("a", PROMPT, 12)]))
    first, second = runs
    assert first is not None
    assert second is not None
    assert first.ids == second.ids
    assert first.speculation == second.speculation


def test_a_stray_file_beside_the_index_is_not_read(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("31B", max_shard_size="100KB"), directory)
    with_head(tiny_checkpoint("31B", vocab_size=VOCAB_SIZE + 5), tmp_path / "other", None)
    shutil.copy(tmp_path / "other" / "model.safetensors", directory / "backup.safetensors")
    assert ModelConfig.from_directory(directory).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("num_added", [0, 16])
def test_ranks_hold_slices_of_the_head(run_on_gang: RunOnGang, num_added: int, tmp_path: Path) -> None:
    source = tiny_checkpoint("26B-A4B", vocab_size=VOCAB_SIZE + num_added, num_added=num_added)
    directory = with_head(source, tmp_path / "model", other_head(source), tied=False)
    prompt = [*PROMPT, VOCAB_SIZE + num_added - 1]
    expected = prompt_logits(solo_model(directory), prompt)
    for size in (1, 2, 4):
        for (logits,) in run_on_gang(size, logits_on_rank, [directory], prompt):
            assert (logits - expected).abs().max() <= 1e-11


@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_assistant_with_a_head_of_its_own_drafts_as_in_transformers(
    tied: bool, centroids: bool, tmp_path: Path
) -> None:
    directory = tiny_checkpoint("31B")
    source = tiny_assistant(directory, centroids=centroids)
    drafter = with_head(source, tmp_path / "assistant", other_head(source), tied=tied)
    target = solo_model(directory, torch.float32)
    assert AssistantConfig.from_directory(drafter, target.config).decoder.has_own_head
    tokens = random_text(3, seed=9)
    states = target_states(directory, PROMPT)
    reference = draft_steps(directory, drafter, states, len(PROMPT), tokens, window=WINDOW)
    found = engine_steps(load_assistant(drafter, target), target, PROMPT, tokens, states)
    assert_equal_steps(found, reference, centroids=centroids)
    own = engine_steps(load_assistant(source, target), target, PROMPT, tokens, states)
    assert not torch.equal(own[0], found[0])


@pytest.mark.parametrize("make", [tiny_assistant, tiny_dflash])
def test_drafters_leave_the_ids_of_an_untied_target_as_they_are(make: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint("31B")
    directory = with_head(source, tmp_path / "model", other_head(source), tied=False)
    config = engine_config(directory, drafter_path=str(make(source)))
    rank = EngineRank(config, SoloCommunicator(), CPU)
    assert (
        rank.rank_info().weight_bytes
        > EngineRank(engine_config(source), SoloCommunicator(), CPU).rank_info().weight_bytes
    )
    run = serve(rank, SoloCommunicator(), [request("a", PROMPT, NEXT)])
    assert run is not None
    assert run.ids["a"] == plain_generate(directory, PROMPT, NEXT)
    assert run.ids["a"] != plain_generate(source, PROMPT, NEXT)


def tables_on_rank(gang: TorchCommunicator, config: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    if gang.rank == 0:
        EngineRank(config, gang.subgroup(1, "target"), CPU, gang=gang)
        return None
    rank = DrafterRank(config, gang, CPU)
    return rank._embedding.table_VH[:VOCAB_SIZE], rank._head_table.table_VH[:VOCAB_SIZE]


def test_dflash_scores_with_the_targets_head_wherever_it_runs(run_on_gang: RunOnGang, tmp_path: Path) -> None:
    source = tiny_checkpoint("31B")
    head_VH = other_head(source)
    directory = with_head(source, tmp_path / "model", head_VH)
    drafter = str(tiny_dflash(source))
    beside = EngineRank(engine_config(directory, drafter_path=drafter), SoloCommunicator(), CPU)
    assert beside._drafter._head._table_VH is beside._model.head_table.table_VH  # type: ignore[attr-defined]
    dedicated = engine_config(directory, drafter_path=drafter, drafter_placement="dedicated")
    _, tables = run_on_gang(2, tables_on_rank, dedicated)
    assert torch.equal(tables[0], embedding_of(source).double())
    assert torch.equal(tables[1], head_VH.double())
