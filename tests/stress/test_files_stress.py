"""Load on one directory: threads, hosts, kills. STRESS_SECONDS is how long each part goes on."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from filestores import (
    leftovers,
    open_files_tenant,
    start_files_child,
    stored_bytes,
    wait_until,
)
from slabs import KIB, chain_keys, in_threads, open_files

SECONDS = float(os.environ.get("STRESS_SECONDS", "8"))

pytestmark = pytest.mark.stress


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("segments", [1, 8], ids=["staged", "in place"])
def test_threads_on_the_same_and_on_other_keys(root: Path, segments: int) -> None:
    """Two threads set and get the same 128 keys, two more others, in a store that is full: no
    error, no wrong byte, as many descriptors as before, nothing left, budget kept."""
    payload = 32 * KIB * segments
    capacity = 900 * (payload + 4 * KIB)
    how: dict[str, Any] = {"payload": payload, "segments": segments, "pages": 4 * 128}
    with open_files_tenant(root, capacity=capacity, **how) as tenant:

        def work(number: int) -> None:
            end, rounds = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                name = "same" if number < 2 else (number, rounds // 2 % 5)
                keys = chain_keys(name, 128)
                if (number + rounds) % 2:
                    assert any(tenant.put(keys, at=128 * number))
                else:
                    tenant.get(keys, at=128 * number)
                rounds += 1
            assert stored_bytes(root) <= capacity

        in_threads(work, range(4))
        before = open_files()
        in_threads(work, range(4))
        wait_until(lambda: open_files() <= before)
        assert not leftovers(root)
        assert all(page.good for page in tenant.store.verify())


def test_kills_while_others_go_on(root: Path) -> None:
    """Writers of other hosts die at random instants while this one lives on: what is there is
    right, what they stored last is there, and their leftovers do not count for ever."""
    chooser = random.Random(7)
    how: dict[str, Any] = {"payload": 16 * KIB, "capacity": 2000 * 20 * KIB}
    told: list[tuple[Any, int, int]] = []
    end = time.monotonic() + SECONDS
    with open_files_tenant(root, host="lives", **how) as reader:
        while time.monotonic() < end:
            child = start_files_child(
                "put_for_ever", root, chooser.randrange(1 << 30), how | {"host": "lives"}
            )
            assert child.stdout is not None
            for _ in range(chooser.randrange(1, 30)):
                name, count, stored = json.loads(child.stdout.readline())
                told.append((tuple(name), count, stored))
                name, count, _ = chooser.choice(told)
                reader.get(chain_keys(name, count))  # raises for a wrong byte
            time.sleep(chooser.random() * 0.02)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:  # what it had said until then
                name, count, stored = json.loads(line)
                told.append((tuple(name), count, stored))
            child.wait()
            name, count, stored = told[-1]
            assert reader.exists(chain_keys(name, count)) >= stored
        assert all(page.good for page in reader.store.verify())
        wait_until(lambda: not leftovers(root), 90)
