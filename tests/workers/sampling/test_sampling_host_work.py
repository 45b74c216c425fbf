"""What the host does for a choice: a fixed number of operations, whatever the rows, their lists and their histories,
and no look at what the device holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.state import SamplingState, drafts_before
from support.oracles.sampling_reference import CPU, sampling_params

VOCAB = 40_000
SHARD = ShardIndices.of_rank(0, 1, org_vocab_size=VOCAB)
PUBLISHED = {"top_k": 64, "top_p": 0.95, "suppress_tokens": (258883, 5)}
LONG_LIST = {**PUBLISHED, "allowed_token_ids": tuple(range(32_768))}
LONG_BIAS = {**PUBLISHED, "logit_bias": {i: (i % 7) - 3.0 for i in range(32_768)}}
SHORT_BIAS = {**PUBLISHED, "logit_bias": {5: 1.0}}
PENALISED = {**PUBLISHED, "repetition_penalty": 1.2, "frequency_penalty": 0.1}
GREEDY = {"temperature": 0.0}


class Operations(TorchDispatchMode):
    """Counts what is called on tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> set[str]:
        """Operations whose result the host must wait for."""
        return {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select"} & self.counts.keys()


def operations(kind: dict[str, Any], num_sequences: int, num_rows: int = 1, history: int = 20) -> Operations:
    """Operations of one choice and its commit, for sequences of `num_rows` rows each."""
    state = SamplingState(num_sequences, SHARD, torch.float32, CPU)
    for slot in range(num_sequences):
        state.admit(slot, sampling_params(seed=slot, **kind), [i % 30_000 for i in range(history)], history - 4)
    logits_RV = torch.zeros(num_sequences * num_rows, SHARD.num_elements_padded)
    slot_S = torch.arange(num_sequences)
    position_R = torch.full((num_sequences * num_rows,), history)
    input_SQ = torch.ones(num_sequences, num_rows, dtype=torch.int64)
    with Operations() as counted:
        features = state.features
        choice = choose(
            logits_RV,
            slot_S.repeat_interleave(num_rows),
            position_R,
            state,
            SoloCommunicator(),
            features=features,
            drafts_RB=drafts_before(input_SQ) if features.penalties else None,
        )
        if features.penalties:
            state.commit(slot_S, choice.ids_R.view(num_sequences, num_rows))
    return counted


@pytest.mark.parametrize(
    "kind", [GREEDY, PUBLISHED, LONG_LIST, PENALISED], ids=["greedy", "defaults", "list", "counted"]
)
def test_operations_do_not_grow_with_the_batch(kind: dict[str, Any]) -> None:
    one, many = operations(kind, 1), operations(kind, 32, num_rows=2)
    if kind is not PENALISED:
        assert many.counts == one.counts
    assert operations(kind, 8, num_rows=2).counts == many.counts
    assert not one.reads | many.reads


@pytest.mark.parametrize(
    ("short", "long", "history"),
    [(PUBLISHED, LONG_LIST, 20), (SHORT_BIAS, LONG_BIAS, 20), (PENALISED, PENALISED, 128_000)],
    ids=["32,768 allowed ids", "32,768 biased ids", "128,000 tokens of history"],
)
def test_lists_and_histories_cost_a_step_nothing(short: dict[str, Any], long: dict[str, Any], history: int) -> None:
    assert operations(long, 16, history=history).counts == operations(short, 16).counts


def test_greedy_choices_are_a_handful_of_operations() -> None:
    assert operations(GREEDY, 32).counts.total() < 40


def test_equal_lists_are_held_once() -> None:
    state = SamplingState(160, SHARD, torch.float32, CPU)
    for slot in range(160):
        state.admit(slot, sampling_params(**LONG_LIST), [1, 2, 3], 3)
    assert state.num_masks == 1
    state.release(0)
    assert state.num_masks == 1
    for slot in range(1, 160):
        state.release(slot)
    assert state.num_masks == 0


def test_features_follow_the_sequences_that_hold_slots() -> None:
    state = SamplingState(2, SHARD, torch.float32, CPU)
    assert state.features == Features()
    state.admit(0, sampling_params(**GREEDY), [1], 1)
    state.admit(1, sampling_params(**PENALISED), [1], 1)
    assert state.features == Features(candidates=64, masks=True, penalties=True)
    state.release(1)
    assert state.features == state.features_of([0]) == Features()
