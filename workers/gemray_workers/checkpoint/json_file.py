"""The JSON files of a checkpoint directory, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemray_workers.errors import CheckpointError


def refuse_broken_link(file: Path) -> None:
    """Raise CheckpointError for a link to nowhere, which would pass for a file that was never there."""
    if is_broken_link(file):
        raise CheckpointError(f"{file} is a link to {file.readlink()}, which is not there")


def is_broken_link(file: Path) -> bool:
    """Whether `file` is a link to something that does not exist."""
    return file.is_symlink() and not file.exists()


def read_json_object(file: Path) -> dict[str, Any]:
    """The object that `file` holds.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, or holds something else than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not a JSON object")
    return content
