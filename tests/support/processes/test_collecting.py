"""The session's garbage collector."""

from __future__ import annotations

import gc


def test_it_collects_again_and_leaves_out_what_was_imported() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
