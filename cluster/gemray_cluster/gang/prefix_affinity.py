"""Which replica has computed the beginning of a prompt before: there its pages may still be."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64
"""Prompts are compared block by block; a shared beginning that is shorter is not worth a detour."""
MAX_BLOCKS = 512
"""Blocks of a prompt that are looked at: what follows 32,768 equal tokens decides nothing any more."""
MAX_REMEMBERED = 1 << 16
"""Blocks that are remembered of one replica; the least recently used go first."""


def block_keys(prompt_ids: Sequence[int]) -> list[bytes]:
    """A key for each whole block from the beginning, up to `MAX_BLOCKS`: equal where all ids up to its end are."""
    keys: list[bytes] = []
    key = b""
    for end in range(BLOCK_TOKENS, min(len(prompt_ids), BLOCK_TOKENS * MAX_BLOCKS) + 1, BLOCK_TOKENS):
        ids = array("q", prompt_ids[end - BLOCK_TOKENS : end]).tobytes()
        key = blake2b(key + ids, digest_size=16).digest()
        keys.append(key)
    return keys


class RememberedPrefixes:
    """The blocks that one gang has computed, as far as they are remembered. Not told what its cache gave up since."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that it has computed."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def note(self, keys: Sequence[bytes]) -> None:
        """It computes these now. The first block counts as the most recently used: without it the others are lost."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)
