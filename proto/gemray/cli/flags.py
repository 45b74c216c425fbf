"""Groups of flags that several commands share: stated once, as the parameters of what makes one value of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args

R = TypeVar("R")


def with_flags(command: Callable[..., R], name: str, make: Callable[..., object], panel: str) -> Callable[..., R]:
    """Replace a command's parameter `name` by the flags that `make` takes, shown together under `panel` in its help.

    What makes a value for one command may have flags of another value itself.
    """
    own = inspect.signature(command, eval_str=True)
    flags = [_in_panel(flag, panel) for flag in inspect.signature(make, eval_str=True).parameters.values()]

    @wraps(command)
    def run(**given: Any) -> R:
        made = make(**{flag.name: given.pop(flag.name) for flag in flags})
        return command(**given, **{name: made})

    parameters = [*(parameter for parameter in own.parameters.values() if parameter.name != name), *flags]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _in_panel(flag: inspect.Parameter, panel: str) -> inspect.Parameter:
    kind, option = get_args(flag.annotation)
    own = copy(option)  # other commands may show the flag elsewhere
    own.rich_help_panel = panel
    return flag.replace(annotation=Annotated[kind, own])
