"""A health client for probes that the kubelet cannot make itself (its gRPC probe knows no TLS).

``python -m gemray_cluster.check.health_probe --address H:P --service NAME [--tls-dir DIR --tls-name DNS]``
exits 0 when the service is SERVING.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray.channel_options import NO_PROXY


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask once; 0 when the service is SERVING, 1 otherwise, with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--service", default="")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--tls-dir", type=Path, help="directory with tls.crt, tls.key and, for mTLS, ca.crt")
    parser.add_argument("--tls-name", help="a DNS name in tls.crt, when --address is not one")
    options = parser.parse_args(arguments)
    with _channel(options.address, options.tls_dir, options.tls_name) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=options.service), timeout=options.timeout
            )
        except grpc.RpcError as error:
            print(f"{options.address} {options.service!r}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if status != "SERVING":
        print(f"{options.address} {options.service!r}: {status}", file=sys.stderr)
        return 1
    return 0


def _channel(address: str, tls_dir: Path | None, tls_name: str | None) -> grpc.Channel:
    # A probe asks its own pod, never through a proxy.
    if tls_dir is None:
        return grpc.insecure_channel(address, options=[NO_PROXY])
    certificate = (tls_dir / "tls.crt").read_bytes()
    authority = tls_dir / "ca.crt"
    credentials = grpc.ssl_channel_credentials(
        # Without a ca.crt the certificate must be its own authority (self-signed).
        root_certificates=authority.read_bytes() if authority.exists() else certificate,
        # The server's own certificate also serves as the client's where the server asks for one.
        private_key=(tls_dir / "tls.key").read_bytes(),
        certificate_chain=certificate,
    )
    # A probe addresses its own pod, and no certificate is made out to that address.
    override = [("grpc.ssl_target_name_override", tls_name)] if tls_name else []
    return grpc.secure_channel(address, credentials, options=[NO_PROXY, *override])


if __name__ == "__main__":
    sys.exit(main())
