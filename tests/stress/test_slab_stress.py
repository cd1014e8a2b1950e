"""Load on one store: threads, processes, kills. STRESS_SECONDS is how long each part goes on."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slabs import (
    KIB,
    MIB,
    allocated,
    chain_keys,
    check_files,
    check_slots,
    finish,
    in_threads,
    open_files,
    open_tenant,
    start_child,
)

SECONDS = float(os.environ.get("STRESS_SECONDS", "8"))

pytestmark = pytest.mark.stress


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def until_end(work: Any, threads: int) -> None:
    """Repeat `work(number, round)` in some threads until time is up."""
    end = time.monotonic() + SECONDS

    def repeat(number: int) -> None:
        rounds = 0
        while time.monotonic() < end:
            work(number, rounds)
            rounds += 1

    in_threads(repeat, range(threads))


@pytest.mark.parametrize("segments", [1, 8], ids=["staged", "in place"])
def test_threads_on_the_same_and_on_other_keys(root: Path, segments: int) -> None:
    """Two threads set and get the same 128 keys, two more others: no error, no wrong byte, no
    descriptor more, all slots accounted for."""
    payload = 32 * KIB * segments
    how: dict[str, Any] = {"payload": payload, "segments": segments, "pages": 4 * 128}
    # Four calls at once take 512 slots, and older pages have to make room.
    capacity = 640 * (payload + 4 * KIB)
    with open_tenant(root, capacity=capacity, segment=capacity // 10, **how) as tenant:

        def work(number: int, rounds: int) -> None:
            name = "same" if number < 2 else (number, rounds // 2 % 5)
            keys = chain_keys(name, 128)
            if (number + rounds) % 2:
                assert any(tenant.put(keys, at=128 * number))
            else:
                tenant.get(keys, at=128 * number)

        for rounds in range(8):
            for number in range(4):
                work(number, rounds)
        before = open_files("segment-")
        until_end(work, 4)
        assert open_files("segment-") == before
        assert check_slots(root).claimed == 0
        check_files([root])


def test_reading_while_slots_are_reused(root: Path) -> None:
    """Without payload checksums and with every slot reused all the time, no wrong byte is read."""
    with open_tenant(
        root, capacity=96 * 68 * KIB, segment=1 * MIB, payload=64 * KIB, pages=4 * 32,
        checks_payload=False,
    ) as tenant:  # fmt: skip
        latest = [chain_keys(0, 32)]

        def work(number: int, rounds: int) -> None:
            if number == 0:
                keys = chain_keys(rounds, 32)
                assert all(tenant.put(keys))
                latest.append(keys)
            else:
                # The oldest that may still be there: about to be overwritten.
                keys = latest[max(0, len(latest) - 1 - number)]
                tenant.get(keys, at=32 * number)

        until_end(work, 4)
        assert check_slots(root).claimed == 0


def test_processes_that_share_shrink_and_clear(root: Path) -> None:
    """Four processes put and get, one clears another model, one takes segments away: no wrong
    byte, no lost slot, budget kept."""
    capacity = 40 * 16 * 20 * KIB
    how: dict[str, Any] = {"payload": 16 * KIB, "segment": 16 * 20 * KIB}
    calls = int(40 * SECONDS)
    users = [start_child("use", root, seed, calls, capacity, how) for seed in range(4)]
    other = {"capacity": capacity, "segment": how["segment"], "model": "other"}
    helpers = [
        start_child("clear_for", root, SECONDS, other),
        start_child("shrink_for", root, SECONDS, capacity // 2, how),
    ]
    reports = [json.loads(finish(child, 60 + 20 * SECONDS)) for child in users]
    for helper in helpers:
        finish(helper, 60 + 20 * SECONDS)
    assert all(report["stored"] and report["right"] for report in reports)
    assert allocated([root]) <= capacity
    with open_tenant(root, capacity=capacity, **how) as tenant:
        assert check_slots(root).claimed == 0
        assert all(page.good for page in tenant.store.verify())
        check_files([root])


def test_kills_while_others_go_on(root: Path) -> None:
    """Writers die at random instants while a reader lives on: what is there is right, and what the
    dead had claimed comes back."""
    chooser = random.Random(7)
    capacity = 32 * 16 * 20 * KIB
    how: dict[str, Any] = {"payload": 16 * KIB, "segment": 16 * 20 * KIB}
    told: list[tuple[tuple[Any, ...], int]] = []
    end = time.monotonic() + SECONDS
    with open_tenant(root, capacity=capacity, **how) as reader:
        while time.monotonic() < end:
            seed = chooser.randrange(1 << 30)
            child = start_child("put_for_ever", root, seed, capacity, how)
            assert child.stdout is not None
            for _ in range(chooser.randrange(1, 30)):
                name, count = json.loads(child.stdout.readline())
                told.append((tuple(name), count))
                name, count = chooser.choice(told)
                reader.get(chain_keys(name, count))  # raises for a wrong byte
            time.sleep(chooser.random() * 0.02)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:  # what it had said until then
                name, count = json.loads(line)
                told.append((tuple(name), count))
            child.wait()
            name, count = told[-1]
            assert all(reader.get(chain_keys(name, count))), "what was stored last is there"
        with open_tenant(root, capacity=capacity, **how) as fresh:
            assert check_slots(root).claimed == 0
            assert all(page.good for page in fresh.store.verify())
            check_files([root])
