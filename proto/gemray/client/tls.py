"""Certificates and keys, read and understood before gRPC gets them: it says nothing of why it cannot use one."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from gemray.client.errors import InvalidOption

BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where systems keep the authorities that they trust, if OpenSSL does not know: Debian, Red Hat, SUSE, Alpine."""


def read_key_pair(key_path: str, certificate_path: str) -> tuple[bytes, bytes]:
    """A private key and the chain of its certificate; raises InvalidOption for files that are none, or no pair."""
    key = _read_pem("tls_key_file", key_path)
    certificate = read_authority("tls_cert_file", certificate_path)
    try:
        # Keys with a pass phrase ask for it, on the terminal unless there is an answer.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_path, key_path, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        allowed = f"the private key, PEM and without a pass phrase, of the certificate in {certificate_path}"
        raise InvalidOption("tls_key_file", key_path, f"{allowed} ({_reason(error)})") from error
    return key, certificate


def read_authority(field: str, path: str) -> bytes:
    """One certificate or several; raises InvalidOption, naming `field`."""
    content = _read_pem(field, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidOption(field, path, f"a PEM file of certificates ({_reason(error)})") from error
    return content


def system_authorities() -> bytes | None:
    """The authorities that this system trusts, PEM; None leaves them to gRPC, which brings a list of its own."""
    if "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH" in os.environ:
        return None
    known = ssl.get_default_verify_paths().cafile  # the file of SSL_CERT_FILE, if that is set
    for path in (known, *BUNDLES):
        if path is not None and Path(path).is_file():
            return Path(path).read_bytes()
    certificates = ssl.create_default_context().get_ca_certs(binary_form=True)  # Windows keeps them in no file
    return "".join(map(ssl.DER_cert_to_PEM_cert, certificates)).encode() or None


def _read_pem(field: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidOption(field, path, f"a readable PEM file ({error.strerror})") from error
    if b"-----BEGIN" not in content:
        raise InvalidOption(field, path, "a PEM file")
    return content


def _reason(error: Exception) -> str:
    """OpenSSL's words, e.g. KEY_VALUES_MISMATCH."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or str(error)).replace("_", " ").lower()
