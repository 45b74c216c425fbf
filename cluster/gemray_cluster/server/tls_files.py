"""TLS files of the server, read as a client reads its own; what is wrong with them is a wrong setting."""

from __future__ import annotations

import grpc

from gemray.client import tls
from gemray.client.errors import InvalidOption
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.watched_files import WatchedFiles
from gemray_workers.errors import InvalidField


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Credentials of the port, None for plain text; raises InvalidField.

    Each handshake takes the files as they are then, so a certificate is rotated by replacing them. What is half
    written, or no pair, is passed over.
    """
    key_file, cert_file, ca_file = config.tls_key_file, config.tls_cert_file, config.tls_client_ca_file
    if key_file is None or cert_file is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        pair = read_key_pair(key_file, cert_file)
        authority = None if ca_file is None else read_authority("tls_client_ca_file", ca_file)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

    files = WatchedFiles([path for path in (key_file, cert_file, ca_file) if path is not None], read)
    return grpc.dynamic_ssl_server_credentials(
        files.latest(), files.latest, require_client_authentication=ca_file is not None
    )


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
