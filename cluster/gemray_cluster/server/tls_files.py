"""TLS files of the server, read as a client reads its own; what is wrong with them is a wrong setting."""

from __future__ import annotations

from gemray.client import tls
from gemray.client.errors import InvalidOption
from gemray_workers.errors import InvalidField


def read_key_pair(key_path: str, certificate_path: str) -> tuple[bytes, bytes]:
    """A private key and the chain of its certificate; raises InvalidField for files that are none, or no pair."""
    try:
        return tls.read_key_pair(key_path, certificate_path)
    except InvalidOption as error:
        raise InvalidField(error.field, error.value, error.allowed) from error


def read_authority(field: str, path: str) -> bytes:
    """One certificate or several; raises InvalidField, naming `field`."""
    try:
        return tls.read_authority(field, path)
    except InvalidOption as error:
        raise InvalidField(error.field, error.value, error.allowed) from error
