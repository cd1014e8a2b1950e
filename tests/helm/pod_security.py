"""The Pod Security Standards of Kubernetes, profile `restricted`, read against a pod.

Owns the rules that a manifest for Linux can break, those of `baseline` among them.
"""

from collections.abc import Iterator
from typing import Any

from .charts import containers

BASELINE_CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(spec: dict[str, Any]) -> set[str]:
    """What `restricted` refuses in the specification of a pod, as ``where: what``."""
    found = set(_pod(spec))
    for container in containers(spec):
        found |= {f"{container['name']}: {what}" for what in _container(container, spec)}
    return found


def _pod(spec: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"pod: {name}"
    for volume in spec.get("volumes", ()):
        (kind,) = volume.keys() - {"name"}
        if kind not in VOLUMES:
            yield f"pod: {kind} {volume['name']}"
    if spec.get("securityContext", {}).get("sysctls"):
        yield "pod: sysctls"


def _container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = {**spec.get("securityContext", {}), **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation", True):
        yield "allowPrivilegeEscalation"
    if not both.get("runAsNonRoot"):
        yield "runAsNonRoot"
    if both.get("runAsUser") == 0:
        yield "runAsUser 0"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities not dropped"
    for name in capabilities.get("add", ()):
        if name != "NET_BIND_SERVICE":
            level = "restricted" if name in BASELINE_CAPABILITIES else "baseline"
            yield f"capability {name} ({level})"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
