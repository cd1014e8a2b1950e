"""Rendered pods, run by podman.

Owns what podman needs changed in a manifest, and a pod that it plays. Must not know what the pods
are for.
"""

import copy
import json
import time
import urllib.request
from collections.abc import Sequence
from typing import Self

import yaml

from containers.podman import Podman

from .charts import Manifest, containers, named

LOG_TAIL_LINES = 40
STOP_TIMEOUT = 120.0


def playable(spec: Manifest, name: str, secrets: Sequence[Manifest]) -> list[Manifest]:
    """A pod of that specification, and its Secrets, as podman 4.3 takes them.

    Nobody replaces it when it ends. What podman does otherwise than Kubernetes is left out: it
    publishes the ports of containers on the machine, and probes by programs in the container. It
    does not decode Secrets, so their files come from ConfigMaps and their variables as values.
    """
    spec = copy.deepcopy(spec) | {"restartPolicy": "Never"}
    texts = {secret["metadata"]["name"]: secret["stringData"] for secret in secrets}
    for volume in spec.get("volumes", ()):
        # They are one for all pods of a name.
        volume["name"] = f"{name}-{volume['name']}"
        if "secret" in volume:
            secret = volume.pop("secret")
            volume["configMap"] = {"name": _of_secret(secret.pop("secretName")), **secret}
    for container in containers(spec):
        for mount in container.get("volumeMounts", ()):
            mount["name"] = f"{name}-{mount['name']}"
        for entry in container.get("env", ()):
            if "valueFrom" in entry:
                reference = entry.pop("valueFrom")["secretKeyRef"]
                entry["value"] = texts[reference["name"]][reference["key"]]
        for key in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(key, None)
    # Containers that only begin it are kept, with their logs.
    annotations = {"io.podman.annotations.init.container.type": "always"}
    metadata = {"name": name, "annotations": annotations}
    return [
        *(_config_map(_of_secret(secret), files) for secret, files in texts.items()),
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
    ]


def _of_secret(name: str) -> str:
    return f"secret-{name}"


def _config_map(name: str, data: dict[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


class PlayedPod:
    """A pod of podman. Use it as a context manager: it ends with the block."""

    def __init__(
        self, podman: Podman, network: str, spec: Manifest, name: str, *others: Manifest
    ) -> None:
        """`others` are the ConfigMaps and Secrets that it mounts."""
        self.podman, self.network, self.spec, self.name = podman, network, spec, name
        secrets = [found for found in others if found["kind"] == "Secret"]
        maps = [found for found in others if found["kind"] == "ConfigMap"]
        self._file = podman.directory / f"{name}.yaml"
        self._file.write_text(yaml.safe_dump_all([*maps, *playable(spec, name, secrets)]))
        self.error = ""
        """What podman said when its start failed."""

    def __enter__(self) -> Self:
        played = self.podman.call("kube", "play", "--network", self.network, str(self._file))
        self.error = played.stderr.strip() if played.returncode else ""
        return self

    def __exit__(self, *_: object) -> None:
        self.podman.call("pod", "rm", "--force", "--time", "0", self.name)

    def started(self) -> Self:
        """It, which must have started."""
        if self.error:
            logs = [self.log(init["name"]) for init in self.spec.get("initContainers", ())]
            raise AssertionError("\n".join([self.error, *logs]))
        return self

    def log(self, container: str) -> str:
        """What a container has printed."""
        ran = self.podman.call("logs", self._container(container))
        return ran.stdout + ran.stderr

    def state(self, container: str) -> Manifest:
        """How a container stands: `Status`, and `ExitCode` once it has ended."""
        found = self.podman.must_call("container", "inspect", self._container(container))
        state: Manifest = json.loads(found)[0]["State"]
        return state

    def call(self, container: str, *command: str) -> str:
        """Run a command in a container that must end well; returns what it printed."""
        return self.podman.must_call("exec", self._container(container), *command)

    def kill(self, container: str) -> None:
        """SIGKILL to every process of a pod's only container; blocks until the pod has ended."""
        self.podman.must_call("kill", self._container(container))
        deadline = time.monotonic() + STOP_TIMEOUT
        while (state := self._inspect()["State"]) != "Exited":
            assert time.monotonic() < deadline, f"{self.name} is {state} after {STOP_TIMEOUT:.0f} s"
            time.sleep(0.2)

    def restart(self) -> None:
        """Start a pod that has ended, with the volumes that it had."""
        self.podman.must_call("pod", "start", self.name)

    def wait_ended(self, container: str, timeout: float) -> int:
        """Block until a container has ended; its status."""
        deadline = time.monotonic() + timeout
        while (state := self.state(container))["Status"] != "exited":
            assert time.monotonic() < deadline, self._tail(container, f"runs after {timeout:.0f} s")
            time.sleep(0.5)
        return int(state["ExitCode"])

    def wait_ready(self, container: str) -> str:
        """Block until its startup probe succeeds, for as long as that may fail; the URL of its
        port."""
        owner = named(self.spec["containers"], container)
        probe = owner["startupProbe"]
        port = named(owner["ports"], probe["httpGet"]["port"])["containerPort"]
        url = f"http://{self._address()}:{port}"
        deadline = time.monotonic() + probe["periodSeconds"] * probe["failureThreshold"]
        while not _answers(url + probe["httpGet"]["path"], probe["timeoutSeconds"]):
            assert self.state(container)["Status"] == "running", self._tail(container, "ended")
            assert time.monotonic() < deadline, self._tail(container, "is not ready")
            time.sleep(0.5)
        return url

    def _address(self) -> str:
        infra = json.loads(self.podman.must_call("inspect", self._inspect()["InfraContainerID"]))
        address: str = infra[0]["NetworkSettings"]["Networks"][self.network]["IPAddress"]
        return address

    def _inspect(self) -> Manifest:
        found: Manifest = json.loads(self.podman.must_call("pod", "inspect", self.name))
        return found

    def _container(self, container: str) -> str:
        return f"{self.name}-{container}"

    def _tail(self, container: str, what: str) -> str:
        lines: Sequence[str] = self.log(container).splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{container} {what}; the end of its log:", *lines])


def _answers(url: str, timeout: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout):
            return True
    except OSError:
        return False
