"""Errors of the front end."""

from __future__ import annotations

from gemray_workers.errors import GemrayError


class QueueFull(GemrayError):
    """The server holds as many requests as it may."""


class OtherCheckpoint(GemrayError):
    """A request names a checkpoint that is not served."""


class RequestsCut(GemrayError):
    """The server ended before its requests did."""


class CallCut(GemrayError):
    """The server ends, and does not wait for a call any longer."""


class EngineFault(GemrayError):
    """The engine could not finish a request; the server lives on."""


class AnswerTooLarge(GemrayError):
    """An answer is larger than a message may be."""


class ClientStalled(GemrayError):
    """A client has stopped reading its stream."""
