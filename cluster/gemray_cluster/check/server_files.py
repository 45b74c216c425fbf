"""Would the server take its certificates and tokens, and can it send traces. It finds out before the ranks start."""

from __future__ import annotations

from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_cluster.observability.request_spans import spans_to
from gemray_cluster.server.auth import read_tokens
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.tls_files import server_credentials
from gemray_workers.errors import GemrayError


def check_server_files(config: ServerConfig) -> list[CheckResult]:
    """Read the files, and look for OpenTelemetry; a result for each of these that the settings name."""
    results = []
    if config.tls_cert_file is not None:
        results.append(_check_tls(config))
    if config.auth_token_file is not None:
        results.append(_check_tokens(config.auth_token_file))
    if config.otlp_traces_endpoint is not None:
        results.append(_check_traces(config.otlp_traces_endpoint))
    return results


def _check_tls(config: ServerConfig) -> CheckResult:
    try:
        server_credentials(config)
    except GemrayError as error:
        return fail("tls", f"{error}.")
    clients = "" if config.tls_client_ca_file is None else f", and clients show one of {config.tls_client_ca_file}"
    return ok("tls", f"{config.tls_cert_file} and {config.tls_key_file} are a pair{clients}.")


def _check_tokens(path: str) -> CheckResult:
    try:
        tokens = read_tokens(path)
    except GemrayError as error:
        return fail("tokens", f"{error}.")
    return ok("tokens", f"{path} has {len(tokens)}.")


def _check_traces(endpoint: str) -> CheckResult:
    try:
        spans_to(endpoint, "gemray").close()
    except GemrayError as error:
        return fail("traces", f"{error}.")
    return ok("traces", f"spans go to {endpoint}; whether a collector is there shows when requests end.")
