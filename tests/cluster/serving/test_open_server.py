"""A server that anybody could use says so, in one sentence, and no other does."""

from __future__ import annotations

import logging

import pytest

from gemray_cluster.server.config import ServerConfig
from gemray_cluster.serving.app import warn_if_open

TLS = {"tls_cert_file": "cert.pem", "tls_key_file": "key.pem"}


@pytest.mark.parametrize(
    ("host", "files", "is_open"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("10.0.0.5", {}, True),
        ("0.0.0.0", TLS, True),
        ("0.0.0.0", {"auth_token_file": "tokens"}, False),
        ("0.0.0.0", {**TLS, "tls_client_ca_file": "ca.pem"}, False),
    ],
)
def test_warning(host: str, files: dict[str, str], is_open: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_open(ServerConfig(host=host, port=50051, **files))  # type: ignore[arg-type]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    words = f"anyone who can reach {host}:50051 may use this server: see --auth-token-file and --tls-client-ca-file"
    assert told == ([words] if is_open else [])
