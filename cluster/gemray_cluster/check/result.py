"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It starts, but something is slower or less safe than it could be."""
    FAIL = "fail"
    """It cannot start."""


@dataclass(frozen=True)
class CheckResult:
    """One check's finding."""

    name: str
    status: Status
    sentence: str
    node: str | None = None
    """The node that it is about, when it is about one."""

    def __str__(self) -> str:
        return f"{self.status.value:<4}  {self.name}: {self.sentence}"


def ok(name: str, sentence: str) -> CheckResult:
    """All is well; the sentence still says what was found."""
    return CheckResult(name, Status.OK, sentence)


def warn(name: str, sentence: str) -> CheckResult:
    """It starts, with a drawback."""
    return CheckResult(name, Status.WARN, sentence)


def fail(name: str, sentence: str) -> CheckResult:
    """It cannot start."""
    return CheckResult(name, Status.FAIL, sentence)


def failed(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Those that keep the server from starting."""
    return [result for result in results if result.status is Status.FAIL]
