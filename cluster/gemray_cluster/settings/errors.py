"""Errors of settings: they also say where a value came from, or how to give one."""

from __future__ import annotations

from gemray_workers.errors import InvalidField

PREFIX = "GEMRAY_"
"""Beginning of the variables' names."""


class InvalidSetting(InvalidField):
    """A setting's value is not allowed; the message also says where it came from."""

    def __init__(self, name: str, value: object, allowed: str, origin: str) -> None:
        super().__init__(name, value, allowed)
        self.args = (f"{name} = {value!r} (from {origin}) is not allowed: {allowed}",)


class MissingSetting(InvalidField):
    """A setting without a default is given nowhere."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None, "set")
        self.args = (f"{name} is not set: give {flag_of(name)}, {PREFIX}{name.upper()}, or {name} in the file",)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
