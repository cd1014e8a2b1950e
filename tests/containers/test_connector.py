"""The connector image on a volume: what it holds, what it says, and what a kill leaves."""

import json
import random
from typing import Any

import pytest

from .conftest import StartConnector
from .harness import STORE

pytestmark = pytest.mark.docker

KIB = 1024
CAPACITY = 64 * KIB * KIB

PLUGINS = """
import nixl_cu12._api as nixl
agent = nixl.nixl_agent("plugins", nixl.nixl_agent_config(backends=[]))
agent.create_backend("POSIX", {"use_uring": "false"})
agent.create_backend("OBJ", {"bucket": "b", "access_key": "a", "secret_key": "s"})
agent.create_backend("AZURE_BLOB", {"account_url": "https://a.example", "container_name": "c"})
print(sorted(agent.get_plugin_list()))
"""


def test_every_storage_plugin_loads(start_connector: StartConnector) -> None:
    """What the image leaves out of NIXL's wheel is nothing that its plug-ins for storage need."""
    output = start_connector().must_call("python", "-c", PLUGINS)
    assert output.splitlines()[-1] == "['AZURE_BLOB', 'GDS', 'GDS_MT', 'OBJ', 'POSIX']"


def test_nothing_imports_torch(start_connector: StartConnector) -> None:
    """The library works without torch and SGLang, and the image has neither."""
    finished = start_connector().call("python", "-c", "import torch")
    assert "No module named 'torch'" in finished.output


def test_user_is_not_root_and_owns_the_volume(start_connector: StartConnector) -> None:
    """The image's user is 10001, and a new volume belongs to it."""
    container = start_connector()
    assert container.must_call("id", "-u").strip() == "10001"
    assert container.must_call("stat", "-c", "%u %a", "/var/lib/hicache").strip() == "10001 700"


def test_probe_on_a_volume(start_connector: StartConnector) -> None:
    """On a named volume the library gets O_DIRECT and a queue, tries both, and says so."""
    findings = start_connector().cli("probe", "--set", f"capacity={CAPACITY}")
    found = {finding["topic"]: finding["found"] for finding in findings}
    assert found["O_DIRECT"] == "on"
    assert found["I/O"].endswith("written and read back here")


def test_pages_of_one_container_are_read_by_another(start_connector: StartConnector) -> None:
    """What one container stored, another one on the same volume reads, byte for byte."""
    names = [["a", 1], ["b", 2]]
    options = {"payload": 64 * KIB, "capacity": CAPACITY}
    start_connector("put_chains", STORE, names, 32, options).must_end(timeout=60)
    reader = start_connector()
    assert [counts["damaged"] for counts in reader.cli("verify").values()] == [0]
    output = reader.child("read_chains", STORE, names, 32, options)
    assert json.loads(output) == [32, 32]


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_in_the_middle_of_a_write(start_connector: StartConnector, seed: int) -> None:
    """SIGKILL to a container that writes: another one opens the store, finds every page that was
    told, byte for byte, and uses the space of those that were not finished."""
    chooser = random.Random(seed)
    options: dict[str, Any] = {"segment": 4 * 68 * KIB * 16, "payload": 64 * KIB, "segments": 2}
    capacity = 4 * options["segment"]
    told: list[Any] = []
    for _ in range(2):
        writer = start_connector(
            "put_for_ever", STORE, chooser.randrange(1 << 30), capacity, options
        )
        writer.wait_lines(chooser.randrange(1, 25), timeout=60)
        writer.kill()
        told += [json.loads(line) for line in writer.lines()]
    start_connector().child("check_after_crash", STORE, told, capacity, options)
