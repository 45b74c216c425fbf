"""An engine without a model, for tests of the scheduler: it carries plans out on a simulated KV store.

Every token is a hash of the request's seed and the token's position, so a request has one right answer. Each cell of
each page remembers whose token at which position was written last; whatever a row would attend to is looked up
through the block tables and compared. A page that two sequences share, or that was freed too early, is found out.
With a prefix cache a cell remembers the text up to its token instead of the request: whoever has that text may read it.

Plans run in the order in which they come, as on a stream: what a plan does to pages happens behind the rows of the
plan before it, whenever the host learns of those. Like a device it knows where each sequence stands, and cuts rows and
drafts at a sequence's end, which the host may not know of yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan

STOP_ID = 0


def token_at(seed: int, position: int, vocab_size: int = 24) -> int:
    """The token that stands at a generated position of a request."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def oracle(submit: Submit, max_model_len: int) -> tuple[list[int], str]:
    """What a request generates when it is alone, one token at a time, and why it ends."""
    generated: list[int] = []
    while True:
        position = len(submit.prompt_ids) + len(generated)
        token_id = token_at(submit.params.seed, position)
        may_stop = len(generated) >= submit.params.min_tokens
        generated.append(token_id)
        if may_stop and token_id in submit.params.stop_token_ids:
            return generated, "stop_token"
        if len(generated) == submit.params.max_tokens or position + 1 == max_model_len:
            return generated, "length"


@dataclass
class _Slot:
    request_id: str
    seed: int
    prompt_len: int
    tokens: list[int]
    end: int
    params: SamplingParams
    tables: dict[str, dict[int, int]]
    computed: int = 0
    is_done: bool = False


@dataclass
class FakeEngine:
    """Holds slots and pages as a rank does.

    `num_correct(request_id, position, num_drafts)` says how many of a step's drafts are right.
    """

    specs: Sequence[KVGroupSpec]
    num_correct: Callable[[str, int, int], int] = lambda _request_id, _position, num_drafts: num_drafts
    faults: set[str] = field(default_factory=set)
    max_model_len: int = 1 << 30
    prefix_cache: bool = False
    """Whether equal beginnings may share pages."""
    matches_stop_ids: bool = False
    """Whether a slot that has met a stop id emits nothing more; else it goes on until its end."""
    slots: dict[int, _Slot] = field(default_factory=dict)
    cells: dict[tuple[str, int, int], tuple[str | int, int, int] | None] = field(default_factory=dict)
    reported_prompt_positions: dict[str, list[int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[SequenceOutcome]:
        """Carry out one plan."""
        for slot in plan.released:
            del self.slots[slot]
        for adm in plan.admitted:
            assert adm.slot not in self.slots, f"slot {adm.slot} is taken"
            tables: dict[str, dict[int, int]] = {spec.name: {} for spec in self.specs}
            self.slots[adm.slot] = _Slot(
                adm.request_id,
                adm.params.seed,
                adm.prompt_len,
                list(adm.token_ids),
                min(adm.prompt_len + adm.params.max_tokens, self.max_model_len),
                adm.params,
                tables,
                computed=adm.num_computed,
            )
            assert self.prefix_cache or not adm.num_computed, "nothing is shared"
            assert adm.num_computed < len(adm.token_ids), "the last token is to be computed"
        self._poison(plan)
        for grant in plan.granted:
            table = self.slots[grant.slot].tables[grant.group]
            for column, page in enumerate(grant.pages, grant.first):
                assert page >= 1, "the null page was granted"
                assert column not in table, f"column {column} was granted twice"
                table[column] = page
        return [self._run_rows(rows) for rows in plan.scheduled]

    def _poison(self, plan: StepPlan) -> None:
        for group, pages in plan.freed_pages.items():
            page_size = next(spec.page_size for spec in self.specs if spec.name == group)
            for page in pages:
                for offset in range(page_size):
                    self.cells[group, page, offset] = None

    def _run_rows(self, rows: ScheduledRows) -> SequenceOutcome:
        slot = self.slots[rows.slot]
        start = slot.computed
        assert rows.start <= start, f"{rows} of a sequence at {start}"
        if rows.samples and (slot.is_done or len(slot.tokens) >= slot.end):
            return SequenceOutcome(rows.slot, [])
        known = slot.tokens[start : start + rows.num_known]
        assert len(known) == rows.num_known
        assert rows.samples == (start + rows.num_known == len(slot.tokens))
        assert rows.samples or (rows.num_drafts == 0 and rows.start == start)
        num_drafts = min(rows.num_drafts, slot.end - len(slot.tokens) - 1)
        if num_drafts:
            self._check_draft_keys(slot, start)
        right = [token_at(slot.seed, len(slot.tokens) + i) for i in range(num_drafts + 1)]
        num_accepted = min(self.num_correct(slot.request_id, start, num_drafts), num_drafts)
        drafts = [token if i < num_accepted else token + 1 for i, token in enumerate(right[:num_drafts])]
        text = slot.tokens + drafts
        owners = self._owners(slot, text)
        for position in range(start, start + rows.num_known + num_drafts):
            self._write(slot, position, text[position], owners[position])
        for position in range(start, start + rows.num_known + num_accepted):
            self._check_keys(slot, position, text, owners)
        if rows.samples and slot.request_id in self.faults:  # its rows are computed, and nothing follows
            slot.computed += rows.num_known + num_accepted
            slot.is_done = True
            return SequenceOutcome(rows.slot, [], fault="NaN logits")
        token_ids = right[: num_accepted + 1] if rows.samples else []
        slot.computed += rows.num_known + num_accepted
        self._emit(slot, token_ids)
        return SequenceOutcome(
            rows.slot,
            token_ids,
            num_accepted if rows.samples else 0,
            num_drafts,
            logprobs=[TokenLogprob(token_id, -1.0) for token_id in token_ids],
            prompt_logprobs=self._prompt_logprobs(slot, rows),
        )

    def _emit(self, slot: _Slot, token_ids: list[int]) -> None:
        for token_id in token_ids:
            may_stop = len(slot.tokens) - slot.prompt_len >= slot.params.min_tokens
            slot.is_done |= self.matches_stop_ids and may_stop and token_id in slot.params.stop_token_ids
            slot.tokens.append(token_id)

    def _prompt_logprobs(self, slot: _Slot, rows: ScheduledRows) -> list[TokenLogprob] | None:
        if rows.prompt_logprobs_from is None:
            return None
        end = min(rows.start + rows.num_known + 1, slot.prompt_len)
        positions = list(range(rows.prompt_logprobs_from, end))
        assert positions, "asked for positions that the rows do not reach"
        assert positions[0] > rows.start, "asked for a position of an earlier row"
        self.reported_prompt_positions.setdefault(slot.request_id, []).extend(positions)
        return [TokenLogprob(slot.tokens[position], -float(position)) for position in positions]

    def _owners(self, slot: _Slot, text: list[int]) -> Sequence[str | int]:
        """Whom the cell of each position belongs to."""
        if not self.prefix_cache:
            return [slot.request_id] * len(text)
        return [*accumulate(text, lambda before, token_id: hash((before, token_id)), initial=0)][1:]

    def _write(self, slot: _Slot, position: int, token_id: int, owner: str | int) -> None:
        for spec in self.specs:
            column, offset = divmod(position, spec.page_size)
            self.cells[spec.name, slot.tables[spec.name][column], offset] = (owner, position, token_id)

    def _check_keys(self, slot: _Slot, query: int, tokens: list[int], owners: Sequence[str | int]) -> None:
        for spec in self.specs:
            first = 0 if spec.window is None else max(0, query - spec.window + 1)
            self._check_range(slot, spec, first, query + 1, tokens, owners)

    def _check_draft_keys(self, slot: _Slot, num_computed: int) -> None:
        """What an MTP drafter reads: the last W computed tokens (spec 4.4)."""
        for spec in self.specs:
            first = 0 if spec.window is None else max(0, num_computed - spec.window)
            self._check_range(slot, spec, first, num_computed, slot.tokens, self._owners(slot, slot.tokens))

    def _check_range(
        self, slot: _Slot, spec: KVGroupSpec, first: int, end: int, tokens: list[int], owners: Sequence[str | int]
    ) -> None:
        for position in range(first, end):
            column, offset = divmod(position, spec.page_size)
            cell = self.cells.get((spec.name, slot.tables[spec.name][column], offset))
            wanted = (owners[position], position, tokens[position])
            assert cell == wanted, f"group {spec.name}, position {position}: read {cell}, not {wanted}"
