"""Throw-away "hosts" on one machine: each has its own network, PID and mount namespaces and an sshd on port 22.

A host has its own address on a bridge, its own home, password file, /tmp/ray and /dev/shm; the rest of the file
system is shared. The machine itself is on the bridge too, as ``Hosts.gateway``: a client outside the cluster.
PID namespaces matter: `ray stop` ends every Ray process that it can see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.waiting import HANG_S

DEBIAN_PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync", "ip": "iproute2"}
SHM_SIZE = "1g"

_SSHD_CONFIG = """\
Port 22
ListenAddress {address}
HostKey {folder}/hostkey
PidFile none
AuthorizedKeysFile {folder}/id.pub
PubkeyAuthentication yes
PasswordAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""


@dataclass(frozen=True)
class Host:
    """One host."""

    name: str
    address: str
    home: Path


@dataclass(frozen=True)
class Hosts:
    """Hosts on one bridge."""

    hosts: tuple[Host, ...]
    gateway: str
    """The machine's own address on their network."""
    private_key: Path
    """Key of the user root, on every host."""


def why_impossible() -> str | None:
    """Why hosts cannot be made here, or None. Installs what is missing where that is possible."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [package for command, package in DEBIAN_PACKAGES.items() if _which(command) is None]
    if missing:
        if shutil.which("apt-get") is None:
            return f"missing {', '.join(missing)}, and no apt-get to install them"
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing]):
            done = subprocess.run(["apt-get", *command], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}"
    probe = f"grprobe{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


@contextmanager
def namespace_hosts(folder: Path, names: tuple[str, ...], *, path: str) -> Iterator[Hosts]:
    """Make the hosts, and end all that runs on them afterwards, whatever happened.

    Args:
        folder: an empty directory for their homes, keys and logs.
        names: their names, e.g. ``("head", "worker")``.
        path: put in front of PATH in their login shells.
    """
    tag = f"gr{os.getpid() % 100000}"
    network = f"10.77.{os.getpid() % 250}"
    processes: list[subprocess.Popen[bytes]] = []
    namespaces: list[str] = []
    try:
        for key in ("id", "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)
        _run("ip", "link", "add", tag, "type", "bridge")
        _run("ip", "addr", "add", f"{network}.1/24", "dev", tag)
        _run("ip", "link", "set", tag, "up")
        hosts = []
        for index, name in enumerate(names):
            host = Host(name, f"{network}.{10 + index}", folder / name / "home")
            namespace = f"{tag}-{name}"
            namespaces.append(namespace)
            _connect(namespace, f"{tag}v{index}", bridge=tag, address=host.address, gateway=f"{network}.1")
            _furnish(folder, host, path)
            processes.append(_boot(folder, host, namespace))
            hosts.append(host)
        made = Hosts(tuple(hosts), f"{network}.1", folder / "id")
        for host in hosts:
            _wait_for_sshd(made, host, folder / host.name / "sshd.log")
        yield made
    finally:
        for process in processes:
            process.kill()  # `unshare --kill-child` then ends the namespace's first process, and with it all others
            process.wait()
        # Links first: a namespace lingers, and its links with it, until its last process is gone.
        for link in [*(f"{tag}v{index}" for index in range(len(names))), tag]:
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def ssh(hosts: Hosts, host: Host, command: str) -> subprocess.CompletedProcess[str]:
    """Run `command` on `host`."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return subprocess.run(
        ["ssh", "-i", str(hosts.private_key), *options, "-o", "ConnectTimeout=2", f"root@{host.address}", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )


def _connect(namespace: str, veth: str, *, bridge: str, address: str, gateway: str) -> None:
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _run("ip", "link", "set", veth, "master", bridge, "up")
    for command in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{address}/24", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["route", "add", "default", "via", gateway],
    ):
        _run("ip", "-n", namespace, *command)


def _furnish(folder: Path, host: Host, path: str) -> None:
    place = folder / host.name
    host.home.mkdir(parents=True)
    (place / "tmp-ray").mkdir()
    (place / "sshd_config").write_text(_SSHD_CONFIG.format(address=host.address, folder=folder))
    # ssh takes ~ from the password file, not from $HOME, so each host has a file of its own.
    entries = Path("/etc/passwd").read_text().splitlines()
    own = [":".join([*e.split(":")[:5], str(host.home), "/bin/bash"]) if e.startswith("root:") else e for e in entries]
    (place / "passwd").write_text("\n".join(own) + "\n")
    (host.home / ".bashrc").write_text(f"export PATH={path}:$PATH RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1\n")


def _boot(folder: Path, host: Host, namespace: str) -> subprocess.Popen[bytes]:
    place = folder / host.name
    Path("/tmp/ray").mkdir(exist_ok=True)
    script = f"""
        mount --bind '{place}/tmp-ray' /tmp/ray
        mount --bind '{place}/passwd' /etc/passwd
        mount -t tmpfs -o size={SHM_SIZE} tmpfs /dev/shm
        exec {_which("sshd")} -D -e -f '{place}/sshd_config'"""
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    with (place / "sshd.log").open("wb") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *isolated, "bash", "-ec", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )


def _wait_for_sshd(hosts: Hosts, host: Host, log: Path) -> None:
    until = time.monotonic() + HANG_S
    while (answer := ssh(hosts, host, "true")).returncode != 0:
        if time.monotonic() > until:
            raise RuntimeError(f"no sshd on {host.name}: {answer.stderr}\n{log.read_text()}")
        time.sleep(0.2)


def _which(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
