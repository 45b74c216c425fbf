"""Whether a drafter was made for the target's tokenizer: drafts are ids, and must mean the same to both."""

from __future__ import annotations

import json
from pathlib import Path

from gemray_workers.errors import CheckpointError, InvalidField

FILE = "tokenizer.json"


def check_same_tokenizer(target: Path, drafter: Path) -> None:
    """Compare the ids of both tokenizer files; a drafter that ships none is taken to use the target's.

    Raises:
        InvalidField: an id means one thing to the target and another to the drafter; both are named.
        CheckpointError: a tokenizer file that cannot be read.
    """
    ours, theirs = target / FILE, drafter / FILE
    if not (ours.is_file() and theirs.is_file()) or ours.read_bytes() == theirs.read_bytes():
        return
    of_target, of_drafter = _tokens_by_id(ours), _tokens_by_id(theirs)
    for token_id in sorted(of_target.keys() | of_drafter.keys()):
        if of_target.get(token_id) != of_drafter.get(token_id):
            raise InvalidField(
                f"drafter {FILE}",
                f"{len(of_drafter)} ids, id {token_id} is {of_drafter.get(token_id)!r}",
                f"the target's {len(of_target)} ids, where id {token_id} is {of_target.get(token_id)!r}",
            )


def _tokens_by_id(file: Path) -> dict[int, str]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        tokens = {token_id: token for token, token_id in content["model"]["vocab"].items()}
        tokens.update({added["id"]: added["content"] for added in content.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} is not a readable tokenizer file: {error!r}") from error
    return tokens
