"""The target model on 1, 2 and 4 ranks in float64: the same logits and the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemray_workers.model.config import ModelConfig
from gemray_workers.parallel.communicator import Communicator
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.oracles.gang_logits import logits_on_rank
from support.oracles.oracle import load_model, prompt_logits, solo_model
from support.processes.gang import RunOnGang

TOLERANCE = 1e-11
NUM_ADDED = 16
PROMPT = [int(i) for i in torch.randint(VOCAB_SIZE, (2 * WINDOW + 3,), generator=torch.Generator().manual_seed(3))]


def weight_bytes_on_rank(comm: Communicator, directory: Path) -> int:
    return load_model(directory, comm, torch.float64).weight_bytes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_and_ids_do_not_depend_on_the_number_of_ranks(run_on_gang: RunOnGang, size: int) -> None:
    plain = [tiny_checkpoint(shape) for shape in SHAPES]
    added = [tiny_checkpoint(s, vocab_size=VOCAB_SIZE + NUM_ADDED, num_added=NUM_ADDED) for s in SHAPES]
    prompts_of = {False: (plain, PROMPT), True: (added, [*PROMPT, VOCAB_SIZE, VOCAB_SIZE + NUM_ADDED - 1])}
    for directories, prompt in prompts_of.values():
        ranks = run_on_gang(size, logits_on_rank, directories, prompt)
        assert all(torch.equal(x, y) for other in ranks[1:] for x, y in zip(ranks[0], other, strict=True))
        for shape, directory, logits in zip(SHAPES, directories, ranks[0], strict=True):
            expected = prompt_logits(solo_model(directory), prompt)
            assert (logits - expected).abs().max() <= TOLERANCE, shape
            assert torch.equal(logits.argmax(-1), expected.argmax(-1)), shape


def test_some_of_the_shapes_have_fewer_kv_heads_than_ranks() -> None:
    fewest = {
        s: min(layer.num_kv_heads for layer in ModelConfig.from_directory(tiny_checkpoint(s)).layers) for s in SHAPES
    }
    assert fewest == {"E2B": 1, "E4B": 2, "12B": 1, "26B-A4B": 2, "31B": 2}


@pytest.mark.parametrize("shape", SHAPES)
def test_added_ids_are_the_last_rows_of_one_vocabulary(shape: Shape) -> None:
    """Split off as added or not, the same rows give the same logits."""
    total = VOCAB_SIZE + NUM_ADDED
    whole = solo_model(tiny_checkpoint(shape, vocab_size=total))
    split = solo_model(tiny_checkpoint(shape, vocab_size=total, num_added=NUM_ADDED))
    assert (whole.config.vocab_size, whole.config.num_added) == (total, 0)
    assert (split.config.vocab_size, split.config.num_added) == (total, NUM_ADDED)
    prompt = [*PROMPT, total - 1, VOCAB_SIZE, VOCAB_SIZE - 1]
    torch.testing.assert_close(prompt_logits(split, prompt), prompt_logits(whole, prompt), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_share_the_weights(run_on_gang: RunOnGang, shape: Shape) -> None:
    """Two ranks hold a little more than half each: norms, routers and small projections are whole on both."""
    directory = tiny_checkpoint(shape)
    [whole] = run_on_gang(1, weight_bytes_on_rank, directory)
    halves = run_on_gang(2, weight_bytes_on_rank, directory)
    assert halves[0] == halves[1]
    assert whole / 2 < halves[0] < 0.6 * whole
