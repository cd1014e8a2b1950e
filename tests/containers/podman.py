"""Podman beside Docker: with storage, networks and settings of a run's own, which end with it.

Its images are Docker's, by a mount: copying SGLang's takes minutes and 3 GB. Owns the calls of
podman. Must not know what its pods are for.
"""

import contextlib
import hashlib
import json
import os
import random
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HANG = 600.0
"""Seconds after which a call hangs."""
SUBNETS = 10
"""How many are tried; some may be the machine's."""


class PodmanError(AssertionError):
    """A call of podman failed."""


class Podman:
    """Podman for one run; its workers share the images. Calls block; they need root."""

    def __init__(self, run: Path) -> None:
        """`run` is the directory of the run."""
        self.directory = run / "podman"
        # Podman takes no longer path than 50 characters for it.
        digest = hashlib.sha256(str(run).encode()).hexdigest()[:12]
        self._state = Path("/run") / f"hicache-nixl-{digest}"

    def begin(self) -> str:
        """Write the settings, once for a run; returns the directory that has everything."""
        self.directory.mkdir(parents=True)
        # Limits below what podman sets: raising one takes a capability that not every root has.
        # Locks in shared memory would be those of the machine's own podman. With its monitors in
        # the pod's cgroup, a pod takes 3 s to remove.
        self._settings.write_text(
            """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
log_driver = "k8s-file"
cgroups = "no-conmon"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
[network]
network_backend = "netavark"
"""
        )
        return str(self.directory)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call podman, however that ends."""
        return subprocess.run(
            self._command(*arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG,
        )

    def must_call(self, *arguments: str) -> str:
        """Call podman, which must end well; returns what it printed."""
        ran = self.call(*arguments)
        if ran.returncode != 0:
            raise PodmanError(f"podman {' '.join(arguments)}: {ran.stderr.strip()}")
        return ran.stdout

    def share(self, image: str, name: str) -> str:
        """Have an image of Docker's, which must keep it as overlay2; returns its name here."""
        described = json.loads(_run("docker", "image", "inspect", image))[0]
        layers = _layers(described["GraphDriver"])
        mounted = self.directory / "images" / name.replace("/", "-").replace(":", "-")
        mounted.mkdir(parents=True)
        _run("mount", "-t", "overlay", "-o", f"ro,lowerdir={layers}", "overlay", str(mounted))
        # An image of one layer with next to nothing in it, and then Docker's in its place.
        archive = mounted.with_suffix(".tar")
        with tarfile.open(archive, "w") as tar:
            tar.addfile(tarfile.TarInfo(mounted.name))
        changes = [f"--change={line}" for line in _instructions(described["Config"])]
        self.must_call("import", "--quiet", *changes, str(archive), name)
        made = json.loads(self.must_call("image", "inspect", name))[0]
        layer = Path(made["GraphDriver"]["Data"]["UpperDir"])
        shutil.rmtree(layer)
        layer.symlink_to(mounted)
        return name

    @contextlib.contextmanager
    def network(self) -> Iterator[str]:
        """A network on which names of pods and containers resolve; all that is on it must have
        ended with the block."""
        name = f"hicache-nixl-{secrets.token_hex(4)}"
        self._create_network(name)
        file = self.directory / "networks" / f"{name}.json"
        made = json.loads(file.read_text()) | {"network_interface": f"hn{secrets.token_hex(4)}"}
        file.write_text(json.dumps(made))
        try:
            yield name
        finally:
            self.must_call("network", "rm", name)

    def is_left(self) -> bool:
        """Whether it has files."""
        return self.directory.exists() or self._state.exists()

    def remove(self) -> None:
        """End everything that runs and remove every file; harmless when repeated."""
        if self._settings.exists():
            self.call("pod", "rm", "--all", "--force", "--time", "0")
            self.call("rm", "--all", "--force", "--time", "0")
        # Podman mounts its own storage there.
        for mounted in (self.directory / "root/overlay", *self.directory.glob("images/*")):
            subprocess.run(["umount", "--lazy", mounted], capture_output=True)
        shutil.rmtree(self._state, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _create_network(self, name: str) -> None:
        # By chance, because what another run chose is seen only while it is in use.
        for _ in range(SUBNETS):
            subnet = f"10.{random.randrange(256)}.{random.randrange(256)}.0/24"
            created = self.call("network", "create", "--subnet", subnet, name)
            if created.returncode == 0:
                return
        raise PodmanError(f"podman finds no free network: {created.stderr.strip()}")

    @property
    def _settings(self) -> Path:
        return self.directory / "containers.conf"

    @property
    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONTAINERS_CONF": str(self._settings),
            "TMPDIR": str(self.directory),
            # Docker's too; the other kinds of rules would need more programs.
            "NETAVARK_FW": "iptables",
        }

    def _command(self, *arguments: str) -> list[str]:
        return [
            "podman",
            f"--root={self.directory / 'root'}",
            f"--runroot={self._state}",
            f"--tmpdir={self._state / 'libpod'}",
            f"--network-config-dir={self.directory / 'networks'}",
            "--storage-driver=overlay",
            *arguments,
        ]


def _layers(driver: dict[str, Any]) -> str:
    """The directories that an image consists of, the uppermost first."""
    if driver["Name"] != "overlay2":
        raise PodmanError(
            f"Docker's storage driver is {driver['Name']}: podman can use images of overlay2 alone"
        )
    data = driver["Data"]
    return ":".join(filter(None, [data["UpperDir"], data.get("LowerDir")]))


def _instructions(config: dict[str, Any]) -> Iterator[str]:
    """What an image says of its containers, as lines of a Dockerfile."""
    for entry in config["Env"]:
        name, _, value = entry.partition("=")
        yield f"ENV {name}={json.dumps(value)}"
    for instruction, command in (("ENTRYPOINT", "Entrypoint"), ("CMD", "Cmd")):
        if config.get(command):
            yield f"{instruction} {json.dumps(config[command])}"
    for instruction, text in (("USER", "User"), ("WORKDIR", "WorkingDir")):
        if config.get(text):
            yield f"{instruction} {config[text]}"


def _run(*command: str) -> str:
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode != 0:
        raise PodmanError(f"{' '.join(command)}: {ran.stderr.strip()}")
    return ran.stdout
