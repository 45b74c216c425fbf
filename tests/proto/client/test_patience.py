"""How long a client waits for the rest of an answer, by a clock that the tests turn."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from gemray.client import Retry, ServerUnreachable
from gemray.client.retry import Attempts

RETRY = Retry(first_s=60, resume_s=120, starting_s=600, delay_s=0, max_delay_s=0)


class Clock:
    """Seconds, and an answer that has begun at 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("gemray.client.retry.time", SimpleNamespace(monotonic=lambda: self.now))

    def begun(self, retry: Retry = RETRY, deadline_s: float | None = None) -> Attempts:
        attempts = Attempts(retry, deadline_s, _began=0, _newest=0, _heard=0)
        attempts.progress()
        return attempts

    def tries(self, attempts: Attempts, at: float, *, starting: bool) -> bool:
        """Whether the client tries again after this failure."""
        self.now = at
        error = ServerUnreachable("no answer")
        error.code = grpc.StatusCode.UNAVAILABLE
        error.retry_after_s = 1.0 if starting else None
        try:
            attempts.delay_after(error)
        except ServerUnreachable:
            return False
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_server_that_cannot_be_reached_is_given_up_first(clock: Clock) -> None:
    attempts = clock.begun()
    assert clock.tries(attempts, 119, starting=False)
    assert not clock.tries(attempts, 121, starting=False)


def test_one_that_starts_is_waited_for_longer(clock: Clock) -> None:
    attempts = clock.begun()
    assert clock.tries(attempts, 100, starting=False)
    for at in (110, 220, 590):
        assert clock.tries(attempts, at, starting=True)
    assert not clock.tries(attempts, 601, starting=True)


def test_one_that_goes_while_it_starts_is_given_up_from_then_on(clock: Clock) -> None:
    attempts = clock.begun()
    assert clock.tries(attempts, 300, starting=True)
    assert clock.tries(attempts, 419, starting=False)
    assert not clock.tries(attempts, 421, starting=False)


def test_a_server_that_says_when_is_asked_no_sooner(clock: Clock) -> None:
    error = ServerUnreachable("starting")
    error.code, error.retry_after_s = grpc.StatusCode.UNAVAILABLE, 7.0
    assert clock.begun(Retry(delay_s=0.2, max_delay_s=5.0)).delay_after(error) == 7.0


def test_a_call_never_outlasts_its_deadline(clock: Clock) -> None:
    assert not clock.tries(clock.begun(deadline_s=50), 50, starting=True)


def test_no_patience_is_none_for_a_start_either(clock: Clock) -> None:
    assert not clock.tries(clock.begun(Retry(resume_s=0, delay_s=0)), 1, starting=True)
