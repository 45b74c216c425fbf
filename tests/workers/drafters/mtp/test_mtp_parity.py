"""The MTP assistant against transformers, float32: logits and recurrent state of every draft step."""

from __future__ import annotations

import pytest
import torch

from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.oracles.mtp_reference import draft_steps, scaled_embedding, target_states
from support.oracles.mtp_steps import TOLERANCE, assert_equal_steps, engine_steps, load_assistant, random_text
from support.oracles.oracle import solo_model

LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1, 2 * WINDOW + 5)
NUM_STEPS = 5


@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
@pytest.mark.parametrize("shape", SHAPES)
def test_draft_steps_equal_those_of_transformers(shape: Shape, centroids: bool) -> None:
    """On the engine's keys: 0 to C-1 for full layers, C-W to C-1 for sliding ones."""
    directory = tiny_checkpoint(shape)
    drafter = tiny_assistant(directory, centroids=centroids)
    target = solo_model(directory, torch.float32)
    assistant = load_assistant(drafter, target)
    for length in LENGTHS:
        text, tokens = random_text(length, seed=length), random_text(NUM_STEPS, seed=100 + length)
        states = target_states(directory, text)
        reference = draft_steps(directory, drafter, states, length, tokens, window=WINDOW)
        engine = engine_steps(assistant, target, text, tokens, states)
        assert_equal_steps(engine, reference, centroids=centroids)
        on_its_own_target = engine_steps(assistant, target, text, tokens)
        assert_equal_steps(on_its_own_target, reference, centroids=centroids, tolerance=10 * TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_more_sliding_key_is_all_that_transformers_has_over_the_engine(shape: Shape) -> None:
    """transformers' own mask on all keys shows sliding layers W + 1 of them: the engine's window, one wider."""
    directory = tiny_checkpoint(shape)
    drafter = tiny_assistant(directory)
    target = solo_model(directory, torch.float32)
    for length in LENGTHS:
        text, tokens = random_text(length, seed=length), random_text(NUM_STEPS, seed=100 + length)
        states = target_states(directory, text)
        reference = draft_steps(directory, drafter, states, length, tokens, window=None)
        wider = engine_steps(load_assistant(drafter, target, more_keys=1), target, text, tokens, states)
        assert_equal_steps(wider, reference, centroids=False)
        own = engine_steps(load_assistant(drafter, target), target, text, tokens, states)
        difference = (own[0] - reference[0]).abs().max().item()
        assert (difference > 1e-3) == (length > WINDOW), (length, difference)


def test_the_input_is_the_targets_embedding_scaled() -> None:
    directory = tiny_checkpoint("31B")
    target = solo_model(directory, torch.float32)
    for token in (0, 17, VOCAB_SIZE - 1):
        torch.testing.assert_close(target.embedding(torch.tensor([token]))[0], scaled_embedding(directory, token))


@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
def test_every_part_of_the_assistant_matters(centroids: bool) -> None:
    """What the comparison would not notice could be wrong: each weight, changed, moves the logits."""
    directory = tiny_checkpoint("26B-A4B")
    target = solo_model(directory, torch.float32)
    drafter = tiny_assistant(directory, centroids=centroids)
    text, tokens = random_text(2 * WINDOW, seed=1), random_text(3, seed=2)
    assistant = load_assistant.__wrapped__(drafter, target)
    before, _ = engine_steps(assistant, target, text, tokens)
    for weight in assistant.weight_targets():
        for copy in weight.copies:
            saved = copy.destination.clone()
            copy.destination.copy_(saved.flip(0) if saved.dtype == torch.int64 else saved * -1.5)
            after, _ = engine_steps(assistant, target, text, tokens)
            copy.destination.copy_(saved)
            assert not torch.equal(before, after), weight.name
