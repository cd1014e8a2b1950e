"""Several hosts on one directory: processes with host ids of their own, some dead, some with a
wrong clock."""

import json
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from filestores import (
    CHANCE,
    INTERVAL_S,
    leftovers,
    open_files_tenant,
    open_plain_files,
    page_files,
    start_files_child,
    stored_bytes,
    wait_for_a_round,
    wait_until,
)
from slabs import KIB, chain_keys, finish

EXPIRY_S = 3.0


def epoch(root: Path) -> int:
    """How often the sweeper has changed."""
    return max((int(path.name) for path in (root / "sweeper").iterdir()), default=0)


def holder(root: Path) -> str:
    """The host that sweeps; nobody while that changes."""
    with suppress(FileNotFoundError, ValueError):
        content = json.loads((root / "sweeper" / f"{epoch(root):08d}").read_text())
        return str(content["holder"]).partition(".")[0]
    return ""


def ask(child: subprocess.Popen[str], value: object) -> Any:
    """Tell a child something and wait for its answer."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(value) + "\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def start_sweeper(root: Path, skew_s: float = 0.0, **how: Any) -> subprocess.Popen[str]:
    """A host that sweeps `root`; it has begun when this returns."""
    child = start_files_child("keep_open", root, skew_s, how)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline()) == "sweeping"
    return child


def test_hosts_share_one_directory(root: Path) -> None:
    """Three hosts write and read the same and other keys in a small store: no wrong byte, one
    sweeper, budget kept, nothing left."""
    capacity = 300 * 20 * KIB
    how = {"payload": 16 * KIB, "capacity": capacity}
    children = [
        start_files_child("use", root, seed, 200, how | {"host": f"host-{seed}"})
        for seed in range(3)
    ]
    most = 0
    while any(child.poll() is None for child in children):
        most = max(most, stored_bytes(root) if root.exists() else 0)
        time.sleep(0.05)
    reports = [json.loads(finish(child)) for child in children]
    assert all(report["stored"] > 0 for report in reports)
    assert sum(report["right"] for report in reports) > 0
    assert most <= CHANCE * capacity
    with open_files_tenant(root, **how) as tenant:
        assert all(page.good for page in tenant.store.verify())
        wait_until(lambda: stored_bytes(root) <= capacity)
        wait_until(lambda: not leftovers(root))


def test_pages_of_one_host_are_there_for_another(root: Path) -> None:
    """What one host has stored, another reads at once, and what one clears is gone for both."""
    with (
        open_files_tenant(root, host="one") as one,
        open_files_tenant(root, host="two") as two,
    ):
        for number in range(3):
            keys = chain_keys(number, 40)
            writer, reader = (one, two) if number % 2 else (two, one)
            assert all(writer.put(keys))
            assert reader.exists(keys) == 40
            assert all(reader.get(keys))
            assert all(reader.put(keys))
        assert len(page_files(root)) == 120
        assert one.store.clear(one.namespace.digest) == 120
        assert two.exists(chain_keys(0, 40)) == 0


def test_a_killed_sweeper_is_replaced(root: Path) -> None:
    """When the host that sweeps dies, another takes over after the expiry and keeps the budget."""
    capacity = 200 * 8 * KIB
    child = start_sweeper(root, host="doomed", capacity=capacity, expiry_s=EXPIRY_S)
    with open_plain_files(root, host="heir", capacity=capacity, expiry_s=EXPIRY_S) as tenant:
        tenant.put(chain_keys("a", 40))
        assert ask(child, "b") == [20, 20]
        time.sleep(2 * EXPIRY_S)
        assert holder(root) == "doomed", "as long as it lives, it keeps its place"
        child.send_signal(signal.SIGSTOP)  # a host that hangs is as good as dead
        wait_until(lambda: holder(root) == "heir")
        stored = sum(sum(tenant.put(chain_keys(number, 40))) for number in range(10))
        assert stored > 200
        assert stored_bytes(root) <= capacity
        child.send_signal(signal.SIGCONT)
        time.sleep(10 * INTERVAL_S)
        assert holder(root) == "heir", "who comes back does not take it away"
        assert ask(child, "c") == [20, 20]
    wait_until(lambda: holder(root) == "doomed")
    child.kill()
    child.wait()
    start = time.monotonic()
    with open_plain_files(root, host="last", capacity=capacity, expiry_s=EXPIRY_S) as tenant:
        wait_until(lambda: holder(root) == "last")
        assert time.monotonic() - start > EXPIRY_S / 2
        assert all(tenant.put(chain_keys("d", 40)))


def test_a_killed_sweeper_on_this_host_is_replaced_at_once(root: Path) -> None:
    """A server that is restarted on the same host need not wait for the lease to expire."""
    child = start_sweeper(root)
    child.kill()
    child.wait()
    before = epoch(root)
    with open_plain_files(root) as tenant:
        wait_until(lambda: tenant.store._house._lease.held, 10)
        assert epoch(root) == before + 1


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
def test_clocks_an_hour_apart(root: Path, skew_s: float) -> None:
    """Neither the lease, nor leftovers, nor the order of eviction suffer from a host whose clock is
    an hour wrong, whoever of the two sweeps."""
    capacity = 500 * 8 * KIB
    how: dict[str, Any] = {"capacity": capacity, "expiry_s": EXPIRY_S}
    child = start_sweeper(root, skew_s, host="wrong", **how)
    with open_plain_files(root, host="right", **how) as tenant:
        keys = chain_keys("a", 20)
        assert all(tenant.put(keys))
        assert ask(child, "b") == [20, 20]
        time.sleep(2 * EXPIRY_S)
        assert holder(root) == "wrong"
        mtimes = [path.stat().st_mtime for path in page_files(root)]
        assert max(mtimes) - min(mtimes) < 60
        draft = tenant.store._spaces[tenant.namespace.digest].drafts()(keys[0])
        assert draft is not None
        stored = 0
        for number in range(40):
            # Those of both hosts are used all the time; the others are oldest.
            assert all(tenant.get(keys)), number
            assert ask(child, "b")[1] == 20
            wait_for_a_round(tenant)  # the uses are on file
            stored += sum(tenant.put(chain_keys(number, 30)))
        assert stored > 2 * 500
        assert stored_bytes(root) <= capacity
        assert len(leftovers(root)) == 1, "it was begun a moment ago, by the file system's clock"
        before = epoch(root)
        child.kill()
        child.wait()
        wait_until(lambda: holder(root) == "right")
        assert epoch(root) == before + 1
        for number in range(50, 60):
            assert all(tenant.get(keys))
            tenant.put(chain_keys(number, 30))
        tenant.store._spaces[tenant.namespace.digest].drop(draft)
        assert stored_bytes(root) <= capacity
