"""Errors that users read: each names the field, the value and what is allowed."""

from __future__ import annotations

_SHOWN_CHARACTERS = 40
"""Characters that an error shows of a text that a client sent."""


class GemrayError(Exception):
    """Base of every error that gemray raises on purpose."""


class InvalidField(GemrayError, ValueError):
    """A setting or request field has a value that is not allowed.

    Attributes:
        field: dotted name as the user wrote it, e.g. ``sampling.top_p``.
        value: the value received.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r} is not allowed: {allowed}")

    def __reduce__(self) -> tuple[type[InvalidField], tuple[str, object, str]]:
        """Pickle by the three parts: a rank's error reaches the coordinator as itself."""
        return type(self), (self.field, self.value, self.allowed)


class Summary(str):
    """A value in words, where the value itself is too long or says nothing: an error shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The words as they stand."""
        return str(self)

    @classmethod
    def of_text(cls, text: str) -> Summary:
        """A text, quoted; of a long one the beginning and the length."""
        shown = text[:_SHOWN_CHARACTERS]
        return cls(repr(text) if shown == text else f"{shown!r}... ({len(text)} characters)")


class CheckpointError(GemrayError):
    """A checkpoint directory cannot be loaded; the message names files and tensors."""


class CommunicationError(GemrayError):
    """A rank could not reach its peers, or a collective failed or passed its deadline: rebuild the gang."""


class AddressUnavailable(GemrayError):
    """A port cannot be listened on; the message says which and why."""


class CapacityError(GemrayError):
    """What was asked for does not fit; the message says wanted and available, with units."""
