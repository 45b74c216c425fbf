"""OpenAI's HTTP API in the chart: a Deployment that runs `gemray openai` against the Service of the drivers."""

from __future__ import annotations

import http.client
import http.server
import inspect
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gemray.cli.openai import openai
from gemray.openai.serve import GRACE_S
from support.cluster.certificates import make_certificates
from support.cluster.command import GEMRAY
from support.deployment.chart_values import DEPLOYMENTS
from support.deployment.helm_chart import Manifest, pick, render
from support.waiting import HANG_S

PATHS = ("/etc/gemray/http-tls", "/etc/gemray/tls")
"""Where the chart mounts the gateway's own certificate and the drivers'."""


def _pod(manifests: list[Manifest]) -> dict[str, Any]:
    return dict(pick(manifests, "Deployment", "-openai")["spec"]["template"]["spec"])


def _flags(manifests: list[Manifest]) -> dict[str, str]:
    """The flags of the rendered command, by name."""
    (container,) = _pod(manifests)["containers"]
    command, *flags = container["args"]
    assert command == "openai"
    return {name: value for name, _, value in (flag.partition("=") for flag in flags)}


def test_there_is_none_unless_asked_for() -> None:
    assert [m for m in render() if m["metadata"]["name"].endswith("-openai")] == []


@pytest.mark.parametrize("name", [name for name in DEPLOYMENTS if name.startswith("openai")])
def test_it_is_a_client_of_the_service(name: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    flags, service = _flags(manifests), pick(manifests, "Service")
    assert flags["--address"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert {flag[2:].replace("-", "_") for flag in flags} <= set(inspect.signature(openai).parameters)
    pod = _pod(manifests)
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": int(flags["--port"])}]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert "RAY_AUTH_TOKEN" not in {entry["name"] for entry in container.get("env", [])}


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({}, set()),
        ({"apiToken": {"secretName": "api"}}, {"--plaintext-token"}),
        (DEPLOYMENTS["openai-over-tls"], {"--tls-ca-file"}),
        (DEPLOYMENTS["openai-with-mtls"], {"--tls-ca-file", "--tls-cert-file", "--tls-key-file"}),
    ],
)
def test_the_way_to_the_drivers_is_as_safe_as_theirs(values: dict[str, Any], flags: set[str]) -> None:
    manifests = render({"openai": {"enabled": True}, **values})
    assert {flag for flag in _flags(manifests) if flag.startswith(("--tls", "--plaintext"))} == flags
    volumes = [volume["secret"] for volume in _pod(manifests)["volumes"] if volume["name"] == "tls"]
    if "--tls-key-file" in flags:
        assert volumes == [{"secretName": "server-tls"}]
    elif flags & {"--tls-ca-file"}:
        assert volumes == [{"secretName": "server-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}], "no key"
    else:
        assert volumes == []


@pytest.mark.parametrize(("name", "scheme"), [("openai", "http"), ("openai-over-tls", "https")])
def test_the_rendered_command_serves_what_its_probes_ask(name: str, scheme: str, tmp_path: Path) -> None:
    """For real, without a server behind it: it lives until it is told to end, and ends in order."""
    make_certificates(tmp_path)
    (container,) = _pod(render(DEPLOYMENTS[name]))["containers"]
    arguments = list(container["args"])
    files = {"tls.crt": "cert.pem", "tls.key": "key.pem", "ca.crt": "cert.pem"}
    for path in PATHS:
        for mounted, made in files.items():
            arguments = [text.replace(f"{path}/{mounted}", str(tmp_path / made)) for text in arguments]
    arguments = [re.sub(r"^--port=.*", "--port=0", text) for text in arguments]
    arguments = [re.sub(r"^--address=.*", "--address=127.0.0.1:1", text) for text in arguments]
    process = subprocess.Popen([*GEMRAY, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("ready: "))
        port = int(ready.split("/v1")[0].rpartition(":")[2])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert (asked["scheme"], asked["port"]) == (scheme.upper(), "http")
            assert _get(scheme, port, asked["path"]) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG_S) == 0
    finally:
        process.kill()
        process.wait()


def _get(scheme: str, port: int, path: str) -> int:
    """The status of a request as the kubelet makes it, which trusts any certificate."""
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, context=ssl._create_unverified_context(), timeout=HANG_S)
        if scheme == "https"
        else http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    )
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_node_that_drains_leaves_a_gateway() -> None:
    budget = pick(render(DEPLOYMENTS["openai-over-tls"]), "PodDisruptionBudget", "-openai")["spec"]
    assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize(("answer", "code"), [("Paris", 0), ("", 1)])
def test_helm_test_asks_it_for_a_completion(answer: str, code: int, tmp_path: Path) -> None:
    """The pod's command for real, against an HTTP server that writes down what it is asked."""
    values = {"openai": {"enabled": True}, "apiToken": {"secretName": "api"}}
    manifests = render(values)
    (container,) = pick(manifests, "Pod", "-openai")["spec"]["containers"]
    service = pick(manifests, "Service", "-openai")
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert environment["URL"] == f"{url}/v1/completions"
    (tmp_path / "token").write_text("secret\nolder\n")
    asked: list[tuple[str, str | None, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers["authorization"], body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"text": answer}]}).encode())

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        there = environment["URL"].replace(url, f"http://127.0.0.1:{server.server_address[1]}")
        environment = {**environment, "URL": there, "TOKEN_FILE": str(tmp_path / "token")}
        command = [sys.executable, *container["command"][1:]]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
        server.shutdown()
        thread.join()
    assert ran.returncode == code, ran.stderr
    prompt = "The capital of France is"
    assert asked == [("/v1/completions", "Bearer secret", {"prompt": prompt, "max_tokens": 16})]


def test_it_is_reached_through_a_service_and_an_ingress() -> None:
    manifests = render(DEPLOYMENTS["openai-over-tls"])
    service = pick(manifests, "Service", "-openai")
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"] == [{"name": "http", "port": 443, "targetPort": "http", "appProtocol": "https"}]
    ingress = pick(manifests, "Ingress", "-openai")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off", "a stream is sent as it comes"


def test_only_the_listed_peers_reach_it() -> None:
    policy = pick(render(DEPLOYMENTS["openai-with-mtls"]), "NetworkPolicy", "-openai")
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert DEPLOYMENTS["openai-with-mtls"]["networkPolicy"]["clients"][0] in rule["from"]
    # It takes requests from outside, so Ray's ports are closed to it.
    (internal,) = pick(render(DEPLOYMENTS["openai"]), "NetworkPolicy", "-internal")["spec"]["ingress"]
    (peer,) = internal["from"]
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["driver", "head", "worker"]


def test_a_gateway_that_ends_lets_its_answers_finish() -> None:
    pod = _pod(render({"openai": {"enabled": True}, "server": {"preStopSeconds": 20}}))
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert pod["terminationGracePeriodSeconds"] > 20 + GRACE_S
