"""Drafters that know the plain ids: right, wrong, or both, as a test asks.

A script says what is proposed for one sequence. It depends on the request and the position alone, so that every rank
of a gang proposes the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gemray_workers.drafters.protocol import Drafter
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.messages import Submit
from gemray_workers.model.batch import ForwardOutput

Texts = Mapping[str, Sequence[int]]
"""By request, its prompt and what plain decoding puts behind it."""

Script = Callable[[str, int, int], list[int]]
"""(request, position of the first draft, how many) -> drafts."""

Override = Callable[[str, int, int], list[int] | None]
"""A script that may leave a real drafter's drafts as they are, by None."""


def plain_texts(submits: Sequence[Submit], ids: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The texts that a run without drafts gave."""
    return {s.request_id: [*s.prompt_ids, *ids[s.request_id]] for s in submits}


def always_right(texts: Texts) -> Script:
    """The plain ids; behind the end of the text, id 0."""

    def script(request_id: str, position: int, count: int) -> list[int]:
        ids = list(texts[request_id][position : position + count])
        return ids + [0] * (count - len(ids))

    return script


def always_wrong(texts: Texts, vocab_size: int) -> Script:
    """Never a plain id."""
    return right_where(texts, vocab_size, lambda _request_id, _position, _offset: False)


def right_until(texts: Texts, vocab_size: int, num_right: int) -> Script:
    """The first `num_right` drafts of a round are plain ids, the others never."""
    return right_where(texts, vocab_size, lambda _request_id, _position, offset: offset < num_right)


def randomly_right(texts: Texts, vocab_size: int, *, share: float = 0.7, seed: int = 0) -> Script:
    """Each draft is right with probability `share`, by a coin of its request and position."""

    def coin(request_id: str, position: int, _offset: int) -> bool:
        return random.Random(f"{seed}/{request_id}/{position}").random() < share

    return right_where(texts, vocab_size, coin)


def right_across(texts: Texts, vocab_size: int, edges: Sequence[int]) -> Script:
    """Right up to two tokens behind each edge, then wrong: rounds whose rejected rows lie across a window's edge."""

    def crossing(_request_id: str, position: int, _offset: int) -> bool:
        return not any(edge + 2 <= position <= edge + 6 for edge in edges)

    return right_where(texts, vocab_size, crossing)


def right_where(texts: Texts, vocab_size: int, is_right: Callable[[str, int, int], bool]) -> Script:
    """Right where `is_right(request, position, offset in the round)` says so, else one id beside the plain one."""
    right = always_right(texts)

    def script(request_id: str, position: int, count: int) -> list[int]:
        return [
            token if is_right(request_id, position + offset, offset) else (token + 1) % vocab_size
            for offset, token in enumerate(right(request_id, position, count))
        ]

    return script


def always(*ids: int) -> Script:
    """The same ids in every round, over and over: stop ids, the mask id, the ends of the vocabulary."""
    return lambda _request_id, _position, count: [ids[i % len(ids)] for i in range(count)]


def in_turn(*scripts: Script) -> Script:
    """By request and position, one of several scripts."""

    def script(request_id: str, position: int, count: int) -> list[int]:
        chosen = scripts[random.Random(f"{request_id}/{position}").randrange(len(scripts))]
        return chosen(request_id, position, count)

    return script


@dataclass(frozen=True)
class Round:
    """One sequence's drafting round as a drafter saw it."""

    request_id: str
    start: int
    """Position of the newest token: the number of committed ones."""
    drafts: list[int]
    """What was proposed."""
    num_accepted: int


class ScriptedDrafter:
    """Proposes what a script says and keeps account of the rounds.

    With an `inner` drafter it lets that one propose first, notes its drafts, and then puts the script's in their
    place: a real drafter's state can so be watched under any acceptance.
    """

    weight_bytes = 0

    def __init__(self, script: Override, inner: Drafter | None = None) -> None:
        """
        Args:
            script: what to propose; None only where an inner drafter has proposed.
            inner: a drafter to watch.
        """
        self._script = script
        self._inner = inner
        self._proposed: dict[int, tuple[str, list[int]]] = {}
        self.rounds: list[Round] = []
        """All rounds; `drafts` are the inner drafter's, if there is one."""
        self.committed: dict[int, int] = {}
        """By slot, rows that are committed."""

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        if self._inner is not None:
            self._inner.propose(rows, slots)
        self._proposed = {}
        for r in sequences_of(rows):
            if r.num_drafts == 0:
                continue
            assert r.num_known == 1, "drafts stand behind the newest token alone"
            columns = slice(r.start + 1, r.start + 1 + r.num_drafts)
            request_id = slots[r.slot].request_id
            scripted = self._script(request_id, r.start + 1, r.num_drafts)
            if self._inner is not None:
                proposed = slots.token_ids_NL[r.slot, columns].tolist()
            else:
                assert scripted is not None
                proposed = scripted
            self._proposed[r.slot] = (request_id, proposed)
            if scripted is not None:
                slots.token_ids_NL[r.slot, columns] = torch.tensor(scripted)

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        if self._inner is not None:
            self._inner.commit(rows, packed, slots, output, accepted_A)
        for r, n in zip(sequences_of(rows), accepted_A.tolist(), strict=False):
            assert 0 <= n <= r.num_drafts
            first = r.start  # of a sequence: behind what the prefix cache had of its text
            assert r.start == self.committed.get(r.slot, first), "rows follow what is committed"
            self.committed[r.slot] = r.start + r.num_known + n
            if r.num_drafts:
                request_id, drafts = self._proposed.pop(r.slot)
                self.rounds.append(Round(request_id, r.start, drafts, n))
        assert not self._proposed, "every round is committed"

    def reset(self, slot: int) -> None:
        self.committed.pop(slot, None)
        if self._inner is not None:
            self._inner.reset(slot)


class SequenceRows(NamedTuple):
    """One sequence's rows as the device has cut them."""

    slot: int
    start: int
    num_known: int
    num_drafts: int


def sequences_of(rows: CycleRows) -> list[SequenceRows]:
    """A cycle's sequences, the null slot left out."""
    table = torch.stack([rows.slot_A, rows.start_A, rows.known_A, rows.drafts_A], dim=1)
    return [SequenceRows(*facts) for facts in table[:-1].tolist()]
