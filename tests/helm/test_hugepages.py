"""The script that raises hugepages, on a host made of files."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from .charts import CHART, PROJECT, named, render

SCRIPT = CHART / "files" / "raise-hugepages.sh"
NEEDED = {"hicache.size": 5, "server.nodeSelector": {"pool": "gpu"}}
"""What the chart asks for where there are hugepages."""
KIB = {"2MB": 2048, "1GB": 1048576}


@dataclass(frozen=True)
class Host:
    """Its memory in MiB, and the files of its hugepages."""

    root: Path

    @classmethod
    def make(cls, root: Path, pages: int, nodes: tuple[int, ...], available: int) -> "Host":
        """With `pages` of 2 MB, those of each NUMA node, and `available` MiB of 64 GiB."""
        host = cls(root)
        host.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {available << 10} kB\n")
        host.write("proc/sys/vm/compact_memory", "")
        host.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", f"{pages}\n")
        for node, count in enumerate(nodes):
            host.write(
                f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages",
                f"{count}\n",
            )
        return host

    def write(self, name: str, content: str) -> None:
        """A file of the kernel's."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def pages(self, node: int | None = None) -> int:
        """How many there are, of a node or in all."""
        place = "kernel/mm" if node is None else f"devices/system/node/node{node}"
        return int((self.root / f"sys/{place}/hugepages/hugepages-2048kB/nr_hugepages").read_text())

    @property
    def compacted(self) -> bool:
        """Whether somebody asked for it."""
        return (self.root / "proc/sys/vm/compact_memory").read_text() == "1\n"

    def run(
        self, *arguments: str, script: str = SCRIPT.name, **environment: str
    ) -> tuple[int, str]:
        """Status and output of a script, with these variables."""
        ran = subprocess.run(
            ["bash", str(SCRIPT.with_name(script)), *arguments],
            env={**os.environ, "HOST_ROOT": str(self.root), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return ran.returncode, ran.stdout


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """100 pages, 60 and 40 on its nodes, and memory for 1000 more beside the twentieth."""
    return Host.make(tmp_path, 100, (60, 40), (64 << 10) // 20 + 2001)


def test_raises(host: Host) -> None:
    """Memory is compacted and the number raised."""
    assert host.run("500") == (0, "hugepages: raised from 100 to 500 of 2MB, 500 wanted\n")
    assert host.compacted
    assert host.pages() == 500


@pytest.mark.parametrize("want", ["0", "99", "100"])
def test_only_raises(host: Host, want: str) -> None:
    """A number that is there already is left alone, and so is memory."""
    assert host.run(want) == (0, f"hugepages: 100 of 2MB, {want} wanted\n")
    assert host.pages() == 100
    assert not host.compacted


def test_a_second_run_changes_nothing(host: Host) -> None:
    """Run again, it finds what it made."""
    host.run("500")
    host.write("proc/sys/vm/compact_memory", "")
    assert host.run("500") == (0, "hugepages: 500 of 2MB, 500 wanted\n")
    assert not host.compacted


def test_numa(host: Host) -> None:
    """Each node gets its share, rounded up, and none loses any."""
    status, output = host.run("--numa", "101")
    assert (status, output) == (0, "hugepages: raised from 100 to 111 of 2MB, 101 wanted\n")
    assert (host.pages(0), host.pages(1), host.pages()) == (60, 51, 100)


def test_memory_for_fewer(host: Host) -> None:
    """More than the host has memory for is one line, and nothing is changed."""
    status, output = host.run("1101")
    assert status == 1
    assert output == (
        "hugepages: 100 of 2MB, 1101 wanted, and this host has memory for 1000 more: ask for less, "
        "or free memory; nothing was changed\n"
    )
    assert host.pages() == 100
    assert not host.compacted


def test_fewer_are_taken(host: Host) -> None:
    """With --or-less the host gives what it has memory for, and says so."""
    status, output = host.run("--or-less", "999999")
    assert status == 0
    assert "raised from 100 to 1100 of 2MB, 999999 wanted" in output
    assert "nr_hugepages is 1100, ordinary pages will be used for the rest" in output
    assert host.pages() == 1100


@pytest.mark.parametrize(("option", "status"), [((), 1), (("--or-less",), 0)])
def test_fragmented(host: Host, option: tuple[str, ...], status: int) -> None:
    """A kernel that gives fewer is read back: an error, or a line."""
    kernel = host.root / "kernel.sh"
    kernel.write_text('echo() { [ "$*" = 500 ] && set -- 300; builtin echo "$@"; }\n')
    ran = host.run(*option, "500", BASH_ENV=str(kernel))
    assert ran[0] == status
    assert "raised from 100 to 300 of 2MB, 500 wanted" in ran[1]
    assert "nr_hugepages is 300, " in ran[1]
    assert ("reserve them at boot with hugepagesz=2M hugepages=500" in ran[1]) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("--size", "3MB", "1"), 1, "--size is 3MB"),
        (("--size", "1GB", "1"), 1, "this kernel has no hugepages of 1GB"),
        (("-1",), 2, "raise-hugepages.sh [--size"),
        (("many",), 2, "raise-hugepages.sh [--size"),
        ((), 2, "raise-hugepages.sh [--size"),
        (("--less", "1"), 2, "raise-hugepages.sh [--size"),
    ],
)
def test_bad_arguments(host: Host, arguments: tuple[str, ...], status: int, line: str) -> None:
    """What it cannot do it says, and changes nothing."""
    assert host.run(*arguments)[0] == status
    assert line in host.run(*arguments)[1]
    assert host.pages() == 100


class Node:
    """A host with a kubelet: a program in the place of nsenter counts what is asked of it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        (host.root / "state").mkdir()
        self.restarts = host.root / "restarts"
        self.works(True)

    def works(self, does: bool) -> None:
        """Whether systemd does what it is told."""
        self.host.write(
            "bin/nsenter", f'#!/bin/sh\n{"" if does else "exit 1"}\necho "$*" >>{self.restarts}\n'
        )
        (self.host.root / "bin/nsenter").chmod(0o755)

    def prepare(self, *arguments: str, unit: str = "k3s-agent") -> tuple[int, str]:
        """Status and output of the script."""
        path = f"{self.host.root / 'bin'}:{os.environ['PATH']}"
        return self.host.run(*arguments, script="prepare-node.sh", PATH=path, KUBELET_UNIT=unit)

    @property
    def asked(self) -> list[str]:
        """The units that were restarted."""
        lines = self.restarts.read_text().splitlines() if self.restarts.exists() else []
        assert all(line.startswith("--target 1 --mount ") for line in lines)
        return [line.partition(" -- systemctl restart ")[2] for line in lines]


@pytest.fixture
def node(host: Host) -> Node:
    """A node of that host."""
    return Node(host)


def test_the_kubelet_is_restarted_once(node: Node) -> None:
    """It is restarted where the number was raised, and not again by a second run."""
    assert node.prepare("500")[0] == 0
    assert node.asked == ["k3s-agent"]
    assert node.prepare("500") == (0, "hugepages: 500 of 2MB, 500 wanted\n")
    assert node.asked == ["k3s-agent"]


@pytest.mark.parametrize(("want", "unit"), [("100", "kubelet"), ("500", "")])
def test_the_kubelet_is_left_alone(node: Node, want: str, unit: str) -> None:
    """It is not restarted where nothing was raised, or where nobody asked for it."""
    assert node.prepare(want, unit=unit)[0] == 0
    assert node.asked == []


def test_a_restart_that_failed_is_made_up(node: Node) -> None:
    """A run that could not restart the kubelet fails, and the next one does it."""
    node.works(False)
    assert node.prepare("500")[0] != 0
    node.works(True)
    assert node.prepare("500")[0] == 0
    assert node.asked == ["k3s-agent"]


def test_a_shortage_is_not_hidden_by_the_restart(node: Node) -> None:
    """The status is that of the raise."""
    assert node.prepare("1101")[0] == 1
    assert node.asked == []


def test_compose_runs_the_same_script() -> None:
    """The one that compose.yaml and people run is the chart's."""
    assert (PROJECT / "docker" / "raise-hugepages.sh").resolve() == SCRIPT


@pytest.mark.helm
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, ["--size", "2MB", "8192"]),
        ({"perNode": "32Gi"}, ["--size", "2MB", "16384"]),
        ({"pageSize": "1Gi", "perNuma": True}, ["--size", "1GB", "--numa", "16"]),
        ({"onShortage": "fallback"}, ["--size", "2MB", "--or-less", "8192"]),
    ],
)
@pytest.mark.parametrize("mode", ["pod", "node"])
def test_the_chart_calls_it(mode: str, values: dict[str, object], arguments: list[str]) -> None:
    """The privileged container gets the script and what to do."""
    given = {f"hugepages.{key}": value for key, value in {"mode": mode, **values}.items()}
    manifests = render(None, NEEDED | given)
    if mode == "pod":
        spec = manifests.server
    else:
        spec = manifests.one("DaemonSet", "-hugepages")["spec"]["template"]["spec"]
    container = named(spec["initContainers"], "hugepages")
    assert container["args"] == arguments
    script = container["command"][1].removeprefix("/scripts/")
    scripts = manifests.one("ConfigMap", "-scripts")["data"]
    assert scripts[script] == (CHART / "files" / script).read_text()
    assert scripts["raise-hugepages.sh"] == SCRIPT.read_text()


@pytest.mark.helm
@pytest.mark.parametrize("mode", ["pod", "node"])
@pytest.mark.parametrize(
    ("per_numa", "paths"),
    [
        (False, {"/sys/kernel/mm/hugepages"}),
        (True, {"/sys/kernel/mm/hugepages", "/sys/devices/system/node"}),
    ],
)
def test_it_sees_the_files_of_the_node(mode: str, per_numa: bool, paths: set[str]) -> None:
    """It is given the node's own files in /sys, and nothing else of the node."""
    given = {**NEEDED, "hugepages.mode": mode, "hugepages.perNuma": per_numa}
    manifests = render(None, given)
    spec = manifests.server
    if mode == "node":
        spec = manifests.one("DaemonSet", "-hugepages")["spec"]["template"]["spec"]
    mounts = {
        mount["name"]: mount["mountPath"]
        for mount in named(spec["initContainers"], "hugepages")["volumeMounts"]
    }
    host = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in spec["volumes"]
        if "hostPath" in volume
    }
    assert set(host.values()) == paths
    assert host == {name: mounts[name] for name in host}


@pytest.mark.helm
@pytest.mark.parametrize("mode", ["off", "preallocated"])
def test_nothing_is_privileged_without_need(mode: str) -> None:
    """Where nothing is raised there is neither the container nor its script."""
    manifests = render(None, {**NEEDED, "hugepages.mode": mode})
    assert "initContainers" not in manifests.server
    assert not manifests.of("DaemonSet")
    assert not manifests.of("ConfigMap", "-scripts")


def test_privileges_are_explained() -> None:
    """Each privilege of the privileged container has a comment above it."""
    text = (CHART / "templates" / "_hugepages.tpl").read_text()
    lines = text[text.index("securityContext:") : text.index("resources:")].splitlines()[1:]
    explained, reason = {}, False
    for line in lines:
        if line.strip().startswith("#"):
            reason = True
        else:
            explained.update(yaml.safe_load(line))
            assert reason or line.strip().startswith(("runAsGroup", "runAsNonRoot")), line
            reason = False
    assert set(explained) == {
        "privileged",
        "runAsUser",
        "runAsGroup",
        "runAsNonRoot",
        "readOnlyRootFilesystem",
    }
