"""A server and how to be let in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from gemray.channel_options import is_this_machine
from gemray.client.errors import InvalidOption
from gemray.client.tls import read_authority, read_key_pair, system_authorities
from gemray.client.token_file import read_tokens

MAX_PORT = 65535
RESOLVERS = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
"""How addresses begin that tell gRPC where to look them up."""

Metadata = Sequence[tuple[str, str]]
"""Names and values that go with a call."""


@dataclass(frozen=True)
class ServerAddress:
    """A server and how to be let in; raises InvalidOption for what cannot be, or would give a token away."""

    address: str
    """HOST:PORT."""
    auth_token_file: str | None = None
    """The first word is sent as a bearer token; read anew for each call."""
    tls_ca_file: str | None = None
    """PEM of the authority of the server's certificate; implies TLS."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    """The client's own certificate and key (mTLS); imply TLS."""
    tls: bool = False
    """TLS with the authorities that this system trusts, unless `tls_ca_file` names others."""
    plaintext_token: bool = False
    """Send the token to another machine without TLS: whoever is on the way can read it."""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= MAX_PORT  # gRPC takes it modulo 65536
        if not is_port or not _is_host(host):
            raise InvalidOption(
                "address", self.address, f"HOST:PORT or [IPv6]:PORT, with a port of 1 to {MAX_PORT} and no http://"
            )
        if self.auth_token_file is not None and not self.takes_tokens:
            raise InvalidOption(
                "auth_token_file",
                self.auth_token_file,
                f"a token for {host} goes over TLS (tls, tls_ca_file); plaintext_token sends it readable for everybody "
                "on the way",
            )

    @property
    def is_encrypted(self) -> bool:
        """Whether calls go over TLS."""
        return self.tls or any((self.tls_ca_file, self.tls_cert_file, self.tls_key_file))

    @property
    def takes_tokens(self) -> bool:
        """Whether a token may be sent: nobody on the way can read it, or `plaintext_token` says so."""
        return self.is_encrypted or self.plaintext_token or is_this_machine(self.address.rpartition(":")[0])

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call; raises InvalidOption."""
        if self.auth_token_file is None:
            return ()
        return (("authorization", f"Bearer {read_tokens(self.auth_token_file)[0]}"),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of the channel; None for plain text. Raises InvalidOption."""
        if not self.is_encrypted:
            return None
        authorities = (
            system_authorities() if self.tls_ca_file is None else read_authority("tls_ca_file", self.tls_ca_file)
        )
        key, chain = self._key_pair()
        return grpc.ssl_channel_credentials(root_certificates=authorities, private_key=key, certificate_chain=chain)

    def _key_pair(self) -> tuple[bytes, bytes] | tuple[None, None]:
        if self.tls_key_file is None and self.tls_cert_file is None:
            return None, None
        if self.tls_key_file is None or self.tls_cert_file is None:
            raise InvalidOption("tls_key_file", self.tls_key_file, "set together with tls_cert_file, or both unset")
        return read_key_pair(self.tls_key_file, self.tls_cert_file)


def _is_host(host: str) -> bool:
    """Whether gRPC could look for this: it looks for anything, as long as it is told to be patient."""
    if host.startswith(RESOLVERS):
        return True
    if host.startswith("["):
        return host.endswith("]") and ":" in host
    return host != "" and not any(char in ":/@" or char.isspace() for char in host)
