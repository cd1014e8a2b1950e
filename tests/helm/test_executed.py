"""The chart executed: its rendered pods run, by podman, on this machine's kernel."""

import copy
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_cpu.client import ADMIN_KEY, EngineClient
from engine_cpu.verdict import Verdict

import hugepages
from containers import harness
from containers.podman import Podman
from containers.runs import Run
from containers.test_runs import first_process, wait_until_nothing_is_left
from s3_access import ADMIN

from .charts import PROJECT, Manifest, Manifests, named, render
from .pods import PlayedPod

CHILD = """
import sys, time
from containers.runs import Run
run = Run.current()
run.begin()
run.podman.begin()
name = run.podman.share(sys.argv[1], "hicache-nixl/child:tested")
with run.podman.network() as network:
    options = ["--detach", f"--network={network}", "--entrypoint=sleep"]
    run.podman.must_call("run", *options, name, "600")
    print(run.name, flush=True)
    time.sleep(600)
"""

pytestmark = [pytest.mark.docker, pytest.mark.helm, pytest.mark.timeout(1200)]

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
PAGE = 16
USER = 10001
S3_START_TIMEOUT = 120.0
TEST_TIMEOUT = 300.0
MEMORY = 256
"""MiB of hugepages that the CPU values give a server, of which its staging is a quarter."""
SCENARIOS = {"slab": "cpu", "s3": "cpu-s3"}
SIZE_MIB = hugepages.SIZE // hugepages.MIB
BARE = "hicache-nixl/bare:tested"
BARE_FILE = """FROM python:3.11-slim-bookworm
RUN --mount=type=cache,target=/root/.cache/pip \\
    --mount=type=bind,source=requirements.lock,target=/requirements.lock \\
    pip install --disable-pip-version-check --root-user-action=ignore --no-deps \\
        $(grep -E '^(nixl.*|numpy|packaging|pydantic.*|typing.*)==' /requirements.lock)
"""
"""An image that has, of what the library needs, what SGLang's own surely has."""

Have = Callable[[str], str]


def played(
    podman: Podman, network: str, manifests: Manifests, spec: Manifest, name: str
) -> PlayedPod:
    """A pod of a release, with what the release has for it."""
    others = [*manifests.of("ConfigMap"), *manifests.of("Secret")]
    return PlayedPod(podman, network, spec, name, *others)


def unique(what: str) -> str:
    """A name that no other pod has."""
    return f"{what}-{secrets.token_hex(3)}"


def images(have: Have, *, engine: bool) -> dict[str, Any]:
    """Values that name the images that podman has. Without `engine` the server's is the tools'."""
    tools = have("connector")
    server = have("sglang-cpu") if engine else tools
    repository, _, tag = server.partition(":")
    return {
        "image.repository": repository,
        "image.tag": tag,
        "toolsImage.tag": tools.partition(":")[2],
    }


class Node:
    """This machine as a node, with its hugepages to oneself: pods that prepare it."""

    def __init__(self, podman: Podman, network: str, values: dict[str, Any]) -> None:
        self.podman, self.network, self.values = podman, network, values

    @property
    def pages(self) -> int:
        """How many hugepages it has."""
        return hugepages.count("nr_hugepages")

    def want(self, pages: int, memory: Path | None = None, **values: Any) -> PlayedPod:
        """A pod that wants the node to have `pages`, whose server only sleeps. `memory` is what it
        takes for /proc/meminfo."""
        name = unique("pages")
        given = {
            "fullnameOverride": name,
            "connector.settings.staging": f"{SIZE_MIB}MiB",
            "hugepages.memory": f"{SIZE_MIB}Mi",
            "hugepages.perNode": f"{pages * SIZE_MIB}Mi",
            "store.slab.hostPaths": [str(self.podman.directory)],
            **{f"hugepages.{key}": value for key, value in values.items()},
        }
        manifests = render("cpu", self.values | given)
        spec = copy.deepcopy(_sleeping(manifests))
        if memory is not None:
            file = {"path": str(memory), "type": "File"}
            spec["volumes"].append({"name": "memory", "hostPath": file})
            init = named(spec["initContainers"], "hugepages")
            init["volumeMounts"].append({"name": "memory", "mountPath": "/proc/meminfo"})
        return played(self.podman, self.network, manifests, spec, name)


def _sleeping(manifests: Manifests) -> Manifest:
    daemons = manifests.of("DaemonSet")
    workload = daemons[0] if daemons else manifests.of("Deployment")[0]
    spec: Manifest = workload["spec"]["template"]["spec"]
    if daemons:
        return spec
    server = named(spec["containers"], "server") | {"command": ["sleep", "infinity"], "args": []}
    return spec | {"containers": [server]}


@pytest.fixture
def node(podman: Podman, podman_network: str, have: Have) -> Iterator[Node]:
    """This machine, whose hugepages are given back."""
    values = images(have, engine=False)
    with hugepages.raised(0):
        yield Node(podman, podman_network, values)


@pytest.mark.parametrize(
    "values",
    [{}, {"perNuma": True}, {"mode": "node", "node.nodeSelector": {"pool": "gpu"}}],
    ids=["pod", "numa", "node"],
)
def test_raises_the_hugepages_of_the_node(node: Node, values: dict[str, Any]) -> None:
    """The privileged container raises the kernel's number, and the pod starts."""
    before = node.pages
    with node.want(before + 8, **values) as pod:
        pod.started()
        assert node.pages == before + 8
        line = f"hugepages: raised from {before} to {before + 8} of 2MB, {before + 8} wanted\n"
        assert pod.log("hugepages") == line


@pytest.mark.parametrize("fewer", [0, 5])
def test_only_raises(node: Node, fewer: int) -> None:
    """A second pod that wants as many or fewer changes nothing."""
    wanted = node.pages + 8
    with node.want(wanted) as pod:
        pod.started()
    with node.want(wanted - fewer) as pod:
        pod.started()
        assert pod.log("hugepages") == f"hugepages: {wanted} of 2MB, {wanted - fewer} wanted\n"
        assert node.pages == wanted


def test_an_impossible_number_fails(node: Node) -> None:
    """More than the node has memory for is one line, and the server does not start."""
    before = node.pages
    with node.want(1 << 20) as pod:
        assert "exited with code 1" in pod.error
        assert "1048576 wanted, and this host has memory for" in pod.log("hugepages")
        assert pod.log("hugepages").count("\n") == 1
        assert pod.state("server")["Status"] != "running"
    assert node.pages == before


def test_an_impossible_number_falls_back(node: Node, tmp_path: Path) -> None:
    """Where that is set, the node gives what it has memory for, and the server starts."""
    # The real memory would be taken from whatever else runs here.
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 1024000 kB\nMemAvailable: 60000 kB\n")
    before = node.pages
    with node.want(before + 100, memory, onShortage="fallback") as pod:
        pod.started()
        assert pod.log("hugepages").endswith("ordinary pages will be used for the rest\n")
        assert pod.state("server")["Status"] == "running"
        assert node.pages == before + 4


class Place:
    """Where a server runs, and what its values say of its store."""

    def __init__(self, podman: Podman, network: str, values: dict[str, Any]) -> None:
        self.podman, self.network = podman, network
        self.name = unique("server")
        self.values = {"fullnameOverride": self.name, **values}

    def server(self, scenario: str) -> PlayedPod:
        """The server's pod."""
        manifests = render(scenario, self.values)
        spec = manifests.of("Deployment")[0]["spec"]["template"]["spec"]
        return played(self.podman, self.network, manifests, spec, self.name)

    def test(self, scenario: str) -> PlayedPod:
        """The pod of ``helm test``."""
        values = {"tests.keySecret": {"name": f"{self.name}-key", "key": "key"}}
        manifests = render(scenario, self.values | values)
        (pod,) = manifests.of("Pod")
        key = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{self.name}-key"},
            "stringData": {"key": ADMIN_KEY},
        }
        name = pod["metadata"]["name"]
        return PlayedPod(
            self.podman, self.network, pod["spec"], name, *manifests.of("ConfigMap"), key
        )


@pytest.fixture
def slab(podman: Podman, podman_network: str, have: Have, tmp_path: Path) -> Iterator[Place]:
    """A slab store in a directory of the node, and hugepages that the pod makes."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    os.chown(disk, USER, USER)
    values = images(have, engine=True)
    with hugepages.raised(0):
        pages = hugepages.count("nr_hugepages") + MEMORY // SIZE_MIB
        values |= {
            "store.slab.hostPaths": [str(disk)],
            "hugepages.perNode": f"{pages * SIZE_MIB}Mi",
        }
        yield Place(podman, podman_network, values)


@pytest.fixture
def s3(podman: Podman, podman_network: str, have: Have, tmp_path: Path) -> Iterator[Place]:
    """A bucket in an S3 server of podman's, and its keys in the values."""
    keys = tmp_path / "keys"
    keys.write_bytes(ADMIN.file())
    keys.chmod(0o644)
    server = unique("objectstore")
    values = images(have, engine=True) | {
        "store.s3.url": f"s3://hicache/demo?endpoint=http://{server}:9000",
        "store.s3.existingSecret": "",
        "store.s3.accessKey": ADMIN.access_key,
        "store.s3.secretKey": ADMIN.secret_key,
    }
    podman.must_call(
        *("run", "--detach", f"--name={server}", f"--network={podman_network}"),
        *("--env=S3_BUCKETS=hicache", f"--volume={keys}:/run/secrets/s3:ro", have("objectstore")),
    )
    try:
        deadline = time.monotonic() + S3_START_TIMEOUT
        while podman.call("exec", server, "healthcheck").returncode != 0:
            assert time.monotonic() < deadline, podman.call("logs", server).stdout
            time.sleep(0.5)
        yield Place(podman, podman_network, values)
    finally:
        podman.call("rm", "--force", "--time=0", "--volumes", server)


@pytest.mark.parametrize("store", ["slab", "s3"])
def test_killed_server_answers_from_storage(store: str, request: pytest.FixtureRequest) -> None:
    """A server that is killed, its pod started again, answers with the same tokens from storage."""
    place: Place = request.getfixturevalue(store)
    with place.server(SCENARIOS[store]) as pod:
        client = EngineClient(pod.started().wait_ready("server"))
        before = client.generate(PROMPT)
        client.wait_stored(before.prompt_tokens // PAGE * PAGE)
        pod.kill("server")
        pod.restart()
        verdict = Verdict(before, EngineClient(pod.wait_ready("server")).generate(PROMPT))
    assert verdict.passed, verdict.sentence("podman kill")
    assert verdict.after.from_storage == (before.prompt_tokens - 1) // PAGE * PAGE


def test_helm_test_passes_in_hugepages(slab: Place) -> None:
    """The pod of `helm test` passes beside a server whose memory for transfers is in hugepages."""
    used = hugepages.count("nr_hugepages") - hugepages.count("free_hugepages")
    with slab.server("cpu") as server:
        server.started().wait_ready("server")
        used -= hugepages.count("nr_hugepages") - hugepages.count("free_hugepages")
        assert -used >= MEMORY // 4 // SIZE_MIB
        with slab.test("cpu") as test:
            status = test.started().wait_ended("prompt-twice", TEST_TIMEOUT)
            log = test.log("prompt-twice")
    assert (status, log.splitlines()[-1].partition(":")[0]) == (0, "PASS"), log


@pytest.fixture
def bare(run: Run, podman: Podman) -> str:
    """The bare image, in Docker and podman under the same name."""

    def build() -> str:
        ran = subprocess.run(
            ["docker", "build", "--quiet", "--tag", BARE, "--file", "-", str(PROJECT)],
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
            input=BARE_FILE,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        return podman.share(ran.stdout.strip(), BARE)

    name: str = run.once("podman-bare", build)
    return name


def test_the_library_comes_from_a_volume_with_wheels(
    bare: str, podman: Podman, podman_network: str, tmp_path: Path
) -> None:
    """Beside an image without the library, what `ci/wheels.sh` made for it is installed and found,
    and hides nothing of the image."""
    disk, wheels = tmp_path / "disk", tmp_path / "wheels"
    disk.mkdir(mode=0o700)
    os.chown(disk, USER, USER)
    made = subprocess.run(
        [PROJECT / "ci" / "wheels.sh", bare, wheels], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    name = unique("wheel")
    repository, _, tag = bare.partition(":")
    values = {
        "fullnameOverride": name,
        "image": {"repository": repository, "tag": tag},
        "server.gpus": 0,
        "connector.wheel.volume": {"hostPath": {"path": str(wheels), "type": "Directory"}},
        "connector.settings.capacity": "64MiB",
        "store.slab": {"volume": "hostPath", "hostPaths": [str(disk)]},
    }
    manifests = render("wheel", values)
    with played(podman, podman_network, manifests, _sleeping(manifests), name) as pod:
        pod.started()
        look = "import hicache_nixl as a, xxhash as b, numpy as c, pydantic as d, nixl_cu12 as e\n"
        look += "print(*(each.__file__.split('/')[2] for each in (a, b, c, d, e)))"
        found = pod.call("server", "python3", "-c", look)
        assert found.split() == ["hicache-nixl"] * 2 + ["local"] * 3
        probed = pod.call("server", "python3", "-m", "hicache_nixl", "probe")
    assert "disk-0/store" in probed


@pytest.mark.usefixtures("podman")
def test_nothing_is_left_by_a_killed_run(run: Run) -> None:
    """What podman has of a run that was killed is removed by its watcher: files, mounts, pods."""
    image = run.once("connector-image", partial(harness.image, "connector"))
    with first_process(CHILD, image) as (child, other):
        assert other.left() == ["podman"]
        assert str(other.podman.directory) in Path("/proc/mounts").read_text()
        child.kill()
        child.wait(60)
        wait_until_nothing_is_left(other)
        assert str(other.podman.directory) not in Path("/proc/mounts").read_text()
