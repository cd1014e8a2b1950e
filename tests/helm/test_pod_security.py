"""What the chart's pods break of the Pod Security Standard `restricted`: exactly these points."""

import pytest

from .charts import render
from .pod_security import violations

PRIVILEGED = {
    f"hugepages: {what}"
    for what in (
        "privileged",
        "allowPrivilegeEscalation",
        "runAsNonRoot",
        "runAsUser 0",
        "capabilities not dropped",
    )
} | {"pod: hostPath hugepages"}
DISKS = {f"pod: hostPath disk-{disk}" for disk in range(4)}


@pytest.mark.helm
@pytest.mark.parametrize(
    ("scenario", "broken"),
    [
        (None, set()),
        ("slab-ephemeral", set()),
        ("slab-claim", set()),
        ("slab-claims", set()),
        ("files", set()),
        ("files-hostpath", {"pod: hostPath shared"}),
        ("s3", set()),
        ("s3-keys", set()),
        ("minio", set()),
        ("wheel", set()),
        ("slab-hostpath", {"pod: hostPath models", *DISKS}),
        ("hugepages-node", set()),
        ("hugepages-pod", {"pod: hostPath numa-nodes", *PRIVILEGED}),
        ("cpu", {"pod: hostPath disk-0", *PRIVILEGED}),
    ],
)
def test_server(scenario: str | None, broken: set[str]) -> None:
    """The server's pod breaks these points and no others."""
    assert violations(render(scenario).server) == broken


@pytest.mark.helm
def test_helpers() -> None:
    """The pods beside the server break nothing, but for the DaemonSet that prepares nodes."""
    daemons = {"pod: hostPID", *PRIVILEGED}
    for scenario in ("minio", "hugepages-node", "everything"):
        manifests = render(scenario)
        for name, spec in manifests.pods:
            if spec is not manifests.server:
                assert violations(spec) == (daemons if "DaemonSet" in name else set()), name


@pytest.mark.helm
def test_the_kubelet_is_not_restarted_unless_asked() -> None:
    """Without a restart the DaemonSet does not see the node's processes."""
    manifests = render("hugepages-node", {"hugepages.node.restartKubelet": False})
    spec = manifests.one("DaemonSet", "-hugepages")["spec"]
    assert violations(spec["template"]["spec"]) == PRIVILEGED


def test_the_rules_find_what_is_wrong() -> None:
    """A pod that does everything wrong is found to."""
    spec = {
        "hostNetwork": True,
        "hostIPC": True,
        "securityContext": {"sysctls": [{"name": "a", "value": "1"}]},
        "volumes": [{"name": "root", "hostPath": {"path": "/"}}],
        "containers": [
            {
                "name": "main",
                "ports": [{"containerPort": 1, "hostPort": 1}],
                "securityContext": {
                    "procMount": "Unmasked",
                    "seccompProfile": {"type": "Unconfined"},
                    "capabilities": {"drop": ["NET_RAW"], "add": ["CHOWN", "SYS_ADMIN"]},
                },
            }
        ],
    }
    assert violations(spec) == {
        "pod: hostNetwork",
        "pod: hostIPC",
        "pod: sysctls",
        "pod: hostPath root",
        "main: allowPrivilegeEscalation",
        "main: runAsNonRoot",
        "main: seccompProfile",
        "main: procMount",
        "main: capabilities not dropped",
        "main: capability CHOWN (restricted)",
        "main: capability SYS_ADMIN (baseline)",
        "main: hostPort",
    }
