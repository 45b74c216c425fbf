"""What a run of faults tells: each outcome as it comes, and the whole at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from support.chaos.faults import Outcome, table
from support.chaos.streams import Streams


class FaultReport:
    """The outcomes of faults under streams."""

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []

    def tell(self, outcome: Outcome, streams: Streams) -> None:
        """Take an outcome, and print it with how the streams fared so far."""
        self._outcomes.append(outcome)
        print(f"{outcome} whole={streams.num_whole} wrong={len(streams.wrong)}", file=sys.stderr, flush=True)

    def text(self, streams: Streams, more: str = "") -> str:
        """The table and what became of the answers, in Markdown; `more` is a last sentence."""
        answers = (
            f"{streams.num_whole} answers were whole and equal to one rank without a drafter; "
            f"{len(streams.wrong)} were lost or changed."
        )
        return f"{table(self._outcomes)}\n\n{' '.join(filter(None, (answers, more)))}\n"


def publish(text: str, faults: Sequence[str], output: Path | None) -> None:
    """Print the report and what was wrong, and write the report to `output`."""
    print(text, "\n".join(faults), sep="")
    if output is not None:
        output.write_text(text)
