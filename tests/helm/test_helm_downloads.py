"""Downloads of the model that are kept from one pod to the next: one directory a repository and revision."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.deployment.chart_values import DEPLOYMENTS
from support.deployment.helm_chart import Manifest, driver_arguments, driver_pod, render, worker_pod


@pytest.mark.parametrize(
    ("name", "volume"),
    [
        ("download-once-per-node", {"hostPath": {"path": "/data/models", "type": "Directory"}}),
        ("download-into-a-claim", {"persistentVolumeClaim": {"claimName": "models"}}),
    ],
)
def test_a_kept_download_may_write_where_it_is_kept(name: str, volume: dict[str, Any]) -> None:
    manifests = render(DEPLOYMENTS[name])
    for pod in (worker_pod(manifests), driver_pod(manifests)):
        assert {"name": "model", **volume} in pod["volumes"]
        for init in pod["initContainers"]:
            assert not next(m for m in init["volumeMounts"] if m["name"] == "model").get("readOnly")
        assert next(m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "model")["readOnly"]


class Downloads:
    """The init containers' command for real, with an `hf` that counts its calls and writes down the revision it got."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "calls"
        self.log.touch()
        script = f'echo "$@" >> {self.log}\necho "$4" > "$6/weights"\nexit "${{HF_EXIT:-0}}"\n'
        (root / "hf").write_text(f"#!/bin/bash\n{script}")
        (root / "hf").chmod(0o755)

    def manifests(self, **download: str) -> list[Manifest]:
        volume = dict(DEPLOYMENTS["download-once-per-node"]["model"]["volume"])
        volume |= {"mountPath": f"{self.root}/models", "download": {**volume["download"], **download}}
        return render({"model": {"path": f"{self.root}/models/target", "volume": volume}})

    def start(self, pod: dict[str, Any], **environment: str) -> subprocess.Popen[bytes]:
        (init,) = pod["initContainers"]
        filled = {entry["name"]: entry["value"] for entry in init["env"] if "value" in entry}
        path = f"{self.root}:{os.environ['PATH']}"
        return subprocess.Popen(init["command"], env={**filled, "PATH": path, **environment})

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


def _served(manifests: list[Manifest], flag: str = "--model") -> str:
    (path,) = [a.partition("=")[2] for a in driver_arguments(manifests) if a.startswith(f"{flag}=")]
    return path


def test_a_kept_download_happens_once(tmp_path: Path) -> None:
    """Four pods of one node start together."""
    downloads = Downloads(tmp_path)
    manifests = downloads.manifests()
    assert downloads.start(worker_pod(manifests), HF_EXIT="3").wait() == 3
    assert len(downloads.calls()) == 1, "and it leaves no mark: the next start tries again"
    # A driver wants less, which has a mark of its own, and nothing where a worker has fetched it all.
    assert downloads.start(driver_pod(manifests)).wait() == 0
    assert downloads.calls()[-1].endswith("--exclude *.safetensors")
    together = [downloads.start(worker_pod(manifests)) for _ in range(4)]
    assert [process.wait() for process in together] == [0] * 4
    assert downloads.start(driver_pod(manifests)).wait() == 0
    assert len(downloads.calls()) == 3


def test_a_kept_download_is_of_one_revision(tmp_path: Path) -> None:
    """From v1 to v2 and back: what v1's drivers are told to serve is v1, and nobody writes where others may read."""
    downloads = Downloads(tmp_path)
    other = {"repository": "google/gemma-4-31b", "revision": "v1"}
    releases = [{"revision": "v1"}, {"revision": "v2"}, {"revision": "v1"}, other]
    paths = []
    for release in releases:
        manifests = downloads.manifests(**release)
        for pod in (driver_pod(manifests), worker_pod(manifests)):
            assert downloads.start(pod).wait() == 0
        path = Path(_served(manifests))
        assert path.name == "target", "the model keeps its name"
        assert (path / "weights").read_text().strip() == release["revision"]
        paths.append(path)
    assert paths[0] == paths[2]
    assert len(set(paths)) == 3
    assert len(downloads.calls()) == 6, "going back downloads nothing"


def test_kept_drafters_have_revisions_as_well() -> None:
    values = DEPLOYMENTS["download-into-a-claim"]
    old, new = (render({**values, "drafter": {**values["drafter"], "revision": revision}}) for revision in ("v1", "v2"))
    assert _served(old) == _served(new)
    assert _served(old, "--drafter") != _served(new, "--drafter")
    inits = worker_pod(new)["initContainers"]
    assert [init["command"][-1] for init in inits] == [_served(new), _served(new, "--drafter")]
