"""Rendering the chart with real helm binaries, and judging what came out."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate
import yaml

from gemray_cluster.settings.settings import ServeSettings
from support.deployment.commands import serve_flags_in

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "gemray"
CRD = ROOT / "tests" / "helm" / "crds" / "ray.io_rayclusters.yaml.gz"
KUBERNETES_VERSION = "1.37"

FOREIGN_KINDS = {"ServiceMonitor", "PrometheusRule", "GRPCRoute", "BackendTLSPolicy", "ScaledObject"}
"""CRDs of other projects: the tests of the chart's shape check the fields that are used."""

Manifest = dict[str, Any]


@cache
def helm_binary(major: int) -> str:
    """Path of helm 3 or 4, fetched once."""
    fetched = subprocess.run(
        [sys.executable, ROOT / "helm" / "tools" / "fetch_helm.py", str(major)],
        check=True,
        capture_output=True,
        text=True,
    )
    return fetched.stdout.strip()


def helm(major: int, *arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with `values` as its values file."""
    return subprocess.run(
        [helm_binary(major), *arguments, *(["--values", "-"] if values is not None else [])],
        input=json.dumps(values) if values is not None else None,
        capture_output=True,
        text=True,
        check=False,
    )


def render_text(values: dict[str, Any] | None = None, *, major: int = 4, release: str = "demo") -> str:
    """`helm template`; fails with helm's words."""
    return _rendered(json.dumps(values or {}), major, release)


@cache
def _rendered(values: str, major: int, release: str) -> str:
    done = helm(major, "template", release, str(CHART), "--namespace", "serving", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: dict[str, Any] | None = None, *, major: int = 4, release: str = "demo") -> list[Manifest]:
    """The rendered manifests."""
    text = render_text(values, major=major, release=release)
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def pick(manifests: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one manifest of `kind` whose name ends with `suffix`; without one not what belongs to the OpenAI gateway."""
    found = [
        m
        for m in manifests
        if m["kind"] == kind
        and (m["metadata"]["name"].endswith(suffix) if suffix else not m["metadata"]["name"].endswith("-openai"))
    ]
    assert len(found) == 1, f"{len(found)} manifests of kind {kind} named *{suffix}"
    return found[0]


def problems(manifest: Manifest) -> list[str]:
    """What the API server would refuse, unknown fields included; empty when it is valid."""
    return list(_problems(pickle.dumps(manifest)))


@cache
def _problems(pickled: bytes) -> tuple[str, ...]:
    """Those of a manifest, of which most sets of values render the same ones."""
    manifest: Manifest = pickle.loads(pickled)
    if manifest["kind"] == "RayCluster":
        return tuple(
            f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
            for error in _raycluster_validator().iter_errors(manifest)
        )
    if manifest["kind"] in FOREIGN_KINDS:
        return ()
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", _schema_contents):
        try:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return (f"{error.path}: {error.message}",)
    return ()


_schema_contents = cache(kubernetes_validate.utils.schema_contents)
"""The library reads megabytes of JSON for each manifest."""


@cache
def _raycluster_validator() -> jsonschema.Draft7Validator:
    with gzip.open(CRD) as file:
        definition = yaml.load(file, Loader=yaml.CSafeLoader)
    version = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")
    schema = _closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def _closed(schema: Any) -> Any:
    """An API server prunes unknown fields of a structural schema; here they are errors, as with strict validation."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in closed and not closed.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if closed.get("nullable") and "type" in closed:
        closed["type"] = [closed["type"], "null"]
    return closed


def worker_pod(manifests: list[Manifest]) -> dict[str, Any]:
    """The spec of the workers' pods."""
    return dict(pick(manifests, "RayCluster")["spec"]["workerGroupSpecs"][0]["template"]["spec"])


def head_pod(manifests: list[Manifest]) -> dict[str, Any]:
    """The spec of the head's pod."""
    return dict(pick(manifests, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"])


def driver_pod(manifests: list[Manifest]) -> dict[str, Any]:
    """The spec of the drivers' pods."""
    return dict(pick(manifests, "Deployment")["spec"]["template"]["spec"])


def driver_arguments(manifests: list[Manifest]) -> list[str]:
    """The command of the drivers: ``gemray serve`` and its flags."""
    arguments: list[str] = driver_pod(manifests)["containers"][0]["args"]
    return arguments


def driver_settings(manifests: list[Manifest]) -> ServeSettings:
    """What `gemray serve` makes of that command; raises InvalidSetting."""
    return ServeSettings.load(serve_flags_in(" ".join(driver_arguments(manifests))), {})
