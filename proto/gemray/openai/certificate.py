"""The gateway's certificate, which may be replaced while it runs, as the server's may."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass, field

from gemray.client.errors import InvalidOption
from gemray.client.tls import read_key_pair

logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None


@dataclass
class WatchedCertificate:
    """A key pair that `context` shows. Connections that are open keep theirs when its files change."""

    context: ssl.SSLContext
    cert_file: str
    key_file: str
    _stamps: tuple[Stamp, Stamp] = field(init=False)

    def __post_init__(self) -> None:
        self._stamps = self._look()

    def renew(self) -> None:
        """Read the files if they have changed. What is half written, or no pair, is told in the log and passed over."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            read_key_pair(self.key_file, self.cert_file)
            self.context.load_cert_chain(self.cert_file, self.key_file)
        except (InvalidOption, OSError) as error:  # half written, perhaps: what follows changes the stamps again
            logger.warning("http_%s; what was read before stays in use", error)
        else:
            logger.info("read again, as they have changed: %s, %s", self.cert_file, self.key_file)

    def _look(self) -> tuple[Stamp, Stamp]:
        return _stamp(self.cert_file), _stamp(self.key_file)


def _stamp(path: str) -> Stamp:
    """What tells contents apart; a link counts as what it leads to, as Kubernetes swaps links."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
