"""Files of bearer tokens, read alike by who shows one and by who asks for it."""

from __future__ import annotations

from pathlib import Path

from gemray.client.errors import InvalidOption

FIELD = "auth_token_file"


def read_tokens(path: str | Path) -> tuple[str, ...]:
    """The tokens of a file, one a line; raises InvalidOption, which names lines and no token.

    A line that no call can show, or that is a remark, is refused: as a token it would let its reader in, or nobody.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark before the first line
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidOption(FIELD, str(path), f"a readable file ({why})") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    for number, line in lines:
        if line.startswith("#"):
            raise InvalidOption(FIELD, str(path), f"a file of tokens, one a line, without remarks (line {number})")
        if not all("!" <= char <= "~" for char in line):
            allowed = f"tokens of visible ASCII characters without spaces, one a line (not line {number})"
            raise InvalidOption(FIELD, str(path), allowed)
    tokens = tuple(line for _, line in lines if line)
    if not tokens:
        raise InvalidOption(FIELD, str(path), "a file with at least one token, one a line")
    return tokens
