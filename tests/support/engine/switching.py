"""Requests that leave the drafter to the server get another one step by step, and other numbers of drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.shares import Drafts


@contextmanager
def switching_drafters(draft_tokens: Mapping[str, int]) -> Iterator[None]:
    """Put a coin of request and position in the place of the controller's choice.

    Args:
        draft_tokens: of the rig's drafters.
    """
    most = list(draft_tokens.values())
    decided = DraftLengthController.__call__

    def tossed(controller: DraftLengthController, sequence: Sequence) -> Drafts:
        if sequence.params.draft_method != "auto":
            return decided(controller, sequence)
        coin = random.Random(f"{sequence.request_id}/{sequence.least_len}")
        drafter = coin.randrange(len(most))
        return Drafts(coin.choice((most[drafter], coin.randint(0, most[drafter]))), drafter)

    with patch.object(DraftLengthController, "__call__", tossed):
        yield
