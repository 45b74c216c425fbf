"""The chart lints, renders and validates in every way of deploying it, and refuses what cannot work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from support.deployment.chart_refusals import REFUSALS
from support.deployment.chart_values import DEPLOYMENTS, Values
from support.deployment.helm_chart import CHART, ROOT, driver_arguments, helm, pick, problems, render, render_text

HELM_MAJORS = (3, 4)
SNAPSHOT = ROOT / "tests" / "helm" / "snapshots" / "default.yaml"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_lints(name: str) -> None:
    linted = helm(4, "lint", "--strict", str(CHART), values=DEPLOYMENTS[name])
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_manifest_is_valid(name: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    found = {f"{m['kind']} {m['metadata']['name']}": problems(m) for m in manifests}
    assert {key: value for key, value in found.items() if value} == {}
    assert {m["kind"] for m in manifests} >= {"Deployment", "Service", "Pod"}
    assert ("RayCluster" in {m["kind"] for m in manifests}) == (name != "existing-cluster")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_both_helms_render_the_same(name: str) -> None:
    assert render(DEPLOYMENTS[name], major=3) == render(DEPLOYMENTS[name], major=4)


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    values, named = REFUSALS[name]
    refused = helm(4, "template", "demo", str(CHART), values=values)
    assert refused.returncode != 0
    assert named in refused.stderr


def test_every_flag_that_the_chart_sets_is_refused_among_the_extra_ones() -> None:
    """A second one would contradict what the pods were made for."""
    template = (CHART / "templates" / "_validate_server.tpl").read_text()
    refused = set(re.findall(r'^  "(--[a-z-]+)" "', template, re.MULTILINE))
    set_by_chart = {
        argument.partition("=")[0]
        for values in DEPLOYMENTS.values()
        for argument in driver_arguments(render(values))
        if argument.startswith("--") and argument not in values.get("server", {}).get("extraArgs", [])
    }
    assert set_by_chart - refused == set()


def test_what_may_be_empty_may_be_null() -> None:
    """As people take the chart's own settings away, for a cluster that forbids or assigns them."""
    parts: Values = {part: {"annotations": None, "labels": None, "tolerations": None} for part in ("worker", "driver")}
    values: Values = {
        **parts,
        "openai": {"enabled": True, "ingress": {"enabled": True, "host": "api.example", "annotations": None}},
        "metrics": {"dashboard": {"enabled": True, "labels": None}},
        "securityContext": {"pod": None, "container": None},
        "ingress": {"enabled": True, "host": "gemray.example", "annotations": None},
    }
    manifests = render(values)
    assert [found for manifest in manifests for found in problems(manifest)] == []
    assert "securityContext" not in pick(manifests, "Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["unknown-key", "bfloat16-on-cpus"])
def test_the_older_helm_lints_and_refuses_too(name: str) -> None:
    values, named = REFUSALS[name]
    assert named in helm(3, "template", "demo", str(CHART), values=values).stderr
    linted = helm(3, "lint", "--strict", str(CHART), values={})
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_validation_finds_planted_errors() -> None:
    """The judges of the tests above are no rubber stamps."""
    manifests = render()
    cluster = pick(manifests, "RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["numOfHost"] = 2
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = "one"
    assert len(problems(cluster)) == 2
    deployment = pick(manifests, "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["containerPrt"] = 1
    assert problems(deployment)


def test_default_rendering_is_the_snapshot() -> None:
    """To accept a change: helm template demo helm/gemray -n serving > tests/helm/snapshots/default.yaml."""
    rendered = [line for line in render_text().splitlines() if line.strip()]
    kept = [line for line in SNAPSHOT.read_text().splitlines() if line.strip()]
    assert rendered == kept


@pytest.mark.parametrize("major", HELM_MAJORS)
def test_notes_hold_a_client_command_for_this_release(major: int, tmp_path: Path) -> None:
    text = _notes(major, tmp_path, {"service": {"port": 6000}})
    assert "kubectl -n serving port-forward service/demo-gemray 6000:6000" in text
    assert 'gemray generate --address 127.0.0.1:6000 --stream "The capital of France is"' in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("default", "1 driver(s) with 1 gang(s) each, 1 in all. A gang is 1 cuda rank(s) in 1 pod(s)"),
        ("router", "2 driver(s) with 2 gang(s) each, 4 in all. A gang is 2 cuda rank(s) in 1 pod(s)"),
        ("hpa", "2 driver(s) with 1 gang(s) each, 2 in all at start."),
        ("dedicated-drafter-apart", "A gang is 8 cuda rank(s) and one of the drafter's in 2 pod(s)"),
        ("existing-cluster", "The ranks run in the pods of RayCluster shared"),
        ("openai", "service/demo-gemray-openai 8000:8000"),
    ],
)
def test_notes_count_what_is_there(name: str, said: str, tmp_path: Path) -> None:
    text = _notes(4, tmp_path, DEPLOYMENTS[name])
    assert said in text
    labels = "app.kubernetes.io/instance=demo,app.kubernetes.io/component=driver"
    assert f"rollout status deployment -l {labels}" in text
    deployment = pick(render(DEPLOYMENTS[name]), "Deployment")["metadata"]["labels"]
    assert dict(pair.split("=") for pair in labels.split(",")).items() <= deployment.items()


def _notes(major: int, tmp_path: Path, values: Values) -> str:
    """`helm template` leaves NOTES out and `helm install` needs a cluster, so they are rendered as a manifest."""
    chart = tmp_path / "gemray"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n'
        f'{{{{- define "notes" -}}}}\n{notes}{{{{- end -}}}}\n'
    )
    shown = helm(major, "template", "demo", str(chart), "--namespace=serving", values=values)
    assert shown.returncode == 0, shown.stderr
    return str(pick([m for m in yaml.load_all(shown.stdout, Loader=yaml.CSafeLoader) if m], "Notes")["text"])


def test_readme_lists_every_value() -> None:
    readme = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = [key for key in _leaves(values) if f"`{key}`" not in readme]
    assert missing == []


def _leaves(values: object, prefix: str = "") -> list[str]:
    """Dotted names of the values, down to what a user sets as one thing."""
    whole = {"resources", "nodeSelector", "affinity", "annotations", "labels", "pod", "container", "nccl"}
    whole |= {"startup", "readiness", "liveness"}
    if not isinstance(values, dict) or not values or prefix.rpartition(".")[2] in whole:
        return [prefix]
    return [leaf for key, value in values.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else key)]
