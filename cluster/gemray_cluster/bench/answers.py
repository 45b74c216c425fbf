"""How the requests of a load were answered: when the tokens of each came, and the row that sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemray_cluster.bench.load import Load
from gemray_cluster.bench.report import Percentiles, RateRow


@dataclass
class Answer:
    """One request, in seconds since the load began."""

    arrived: float
    messages: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many at once."""
    refusal: str | None = None
    """Why the answer is missing or incomplete."""

    @property
    def first_token_s(self) -> float:
        """From arrival to the first token."""
        return self.messages[0][0] - self.arrived

    @property
    def between_tokens_s(self) -> list[float]:
        """Seconds of each token after the first message; tokens of one message share the time since the message
        before."""
        return [
            (now - before) / count
            for (before, _), (now, count) in zip(self.messages, self.messages[1:], strict=False)
            for _ in range(count)
        ]

    def is_good(self, load: Load) -> bool:
        """Whether it was answered within the load's limits."""
        if self.refusal is not None or not self.messages:
            return False
        gaps = self.between_tokens_s
        mean_ms = 1000 * sum(gaps) / len(gaps) if gaps else 0.0
        return 1000 * self.first_token_s <= load.first_token_limit_ms and mean_ms <= load.between_tokens_limit_ms


def rate_row(
    name: str, where: str, load: Load, rate: float, answers: Sequence[Answer], *, method: str, device: str
) -> RateRow:
    """Sum up the requests of one rate.

    Args:
        name: of the setup or server.
        where: ``engine`` or ``server``.
        load: whose limits count.
        rate: requests a second that were asked for.
        answers: at least one.
        method: of the drafter.
        device: on which they were computed.
    """
    answered = [answer for answer in answers if answer.refusal is None and answer.messages]
    ended = max((answer.messages[-1][0] for answer in answers if answer.messages), default=0.0)
    seconds = max(ended, load.seconds)
    good = sum(answer.is_good(load) for answer in answers)
    return RateRow(
        name=name,
        where=where,
        method=method,
        rate=rate,
        sampling=load.sampling,
        requests=len(answers),
        refused=len(answers) - len(answered),
        seconds=seconds,
        first_token=_percentiles([answer.first_token_s for answer in answered]),
        between_tokens=_percentiles([gap for answer in answered for gap in answer.between_tokens_s]),
        tokens_per_s=sum(count for answer in answers for _, count in answer.messages) / seconds,
        good_share=good / len(answers),
        goodput=good / seconds,
        first_token_limit_ms=load.first_token_limit_ms,
        between_tokens_limit_ms=load.between_tokens_limit_ms,
        prompts=load.prompt.by_tokens,
        outputs=load.output.by_tokens,
        device=device,
    )


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    return Percentiles.of([1000 * s for s in seconds]) if seconds else None
