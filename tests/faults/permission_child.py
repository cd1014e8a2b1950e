"""In a process that modes hold for: `permission_child.py <slab or files> <directory of the store>`.

Threads set and get through a guard, every byte compared, while the directories cannot be entered
and afterwards. Ends badly for whatever went wrong.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import held_up
from filestores import open_files_tenant, wait_until
from hicache_nixl.guard import Guard
from slabs import KIB, Tenant, chain_keys, in_threads, open_files, open_tenant

DEADLINE_S = 1.0
SLACK_S = 2.0
FAULT_S = 2.0
RECOVERY_S = 30.0
BATCH = 8


def main(kind: str, directory: Path) -> None:
    open_one: Any = open_tenant if kind == "slab" else open_files_tenant
    with open_one(directory, payload=32 * KIB, pages=4 * BATCH) as tenant:
        guard = tenant.store = Guard(tenant.store, deadline_s=DEADLINE_S)
        tenant.deadline_s = DEADLINE_S
        try:
            for group in range(6):
                wait_until(lambda it=group: all(tenant.put(chain_keys(it, BATCH))))
            before = open_files(str(directory))
            lose_permission(tenant, kind, directory)
            wait_works(tenant)
            wait_until(lambda: guard.state().stuck_threads == 0)
            # Two more may be connections to the index.
            wait_until(lambda: open_files(str(directory)) <= before + 2)
        finally:
            guard.close()


def lose_permission(tenant: Tenant, kind: str, directory: Path) -> None:
    stop = threading.Event()
    held_up.watch()

    def work(thread: int) -> None:
        count = 0
        while not stop.is_set():
            keys = chain_keys((count * 5 + thread) % 8, BATCH)
            began = time.monotonic()
            (tenant.put if thread == 0 else tenant.get)(keys, at=thread * BATCH)
            tenant.exists(keys)
            late = time.monotonic() - began - 2 * DEADLINE_S
            assert late < SLACK_S or late < held_up.held_up_since(began)
            count += 1
            time.sleep(0.001)

    def fault(_: int) -> None:
        try:
            tree = [directory, *sorted(directory.rglob("*"))]
            modes = {path: path.stat().st_mode for path in tree if path.is_dir()}
            for path in reversed(modes):
                path.chmod(0)
            try:
                list(directory.iterdir())
            except PermissionError:
                pass
            else:
                raise AssertionError("modes do not hold for this process")
            time.sleep(FAULT_S)
            if kind == "files":  # a slab store goes on with the files that it has open
                assert tenant.exists(chain_keys(0, BATCH)) == 0
                assert not any(tenant.put(chain_keys("new", BATCH), at=3 * BATCH))
            for path, mode in modes.items():
                path.chmod(mode)
        finally:
            stop.set()

    in_threads(lambda number: (fault if number == 3 else work)(number), range(4))


def wait_works(tenant: Tenant) -> None:
    end, number = time.monotonic() + RECOVERY_S, 0
    while True:
        keys = chain_keys(("after", number), BATCH)
        if all(tenant.put(keys)) and tenant.exists(keys) == BATCH and all(tenant.get(keys)):
            return
        assert time.monotonic() < end, tenant.store
        time.sleep(0.05)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
