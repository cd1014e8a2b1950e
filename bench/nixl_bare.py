"""NIXL without a store: one preallocated file, registered once, pages at fixed places.

The ceiling of any NIXL connector: no index, no checksum, no trailer, no eviction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.plan import BenchError
from bench.pools import HostPages

_DEADLINE = 120.0
_POLL = 5e-6  # short: a ceiling should not be one of sleeping


class BareNixl:
    """Batches written one behind the other into a file of `capacity` bytes, then over again."""

    name = "nixl"
    has_index = False

    def __init__(self) -> None:
        self._agent: Any = None
        self._fd = -1
        self._places: dict[str, int] = {}
        self._next = 0

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:
        """Create the file, register it and the host pool. Blocks."""
        from nixl._api import nixl_agent, nixl_agent_config

        directory.mkdir(parents=True, exist_ok=True)
        self._host = host
        batches = max(1, capacity // host.nbytes)
        self._slots = batches * host.count
        self._size = batches * host.nbytes
        file = directory / "pages"
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, self._size)
        agent = nixl_agent("bench-bare", nixl_agent_config(backends=[]))
        agent.create_backend("POSIX", {})
        address, nbytes = host.region
        self._registrations = [
            agent.register_memory(agent.get_reg_descs([(address, nbytes, 0, "")], "DRAM")),
            agent.register_memory(agent.get_reg_descs([(0, self._size, self._fd, "")], "FILE")),
        ]
        self._agent = agent
        self._addresses, self._length = host.segments()

    def set(self, keys: Sequence[str]) -> list[bool]:
        """Write the pool's pages at the next places."""
        first = self._next
        self._next = (self._next + len(keys)) % self._slots
        self._places[keys[0]] = first
        self._transfer("WRITE", first)
        return [True] * len(keys)

    def get(self, keys: Sequence[str]) -> list[bool]:
        """Read the pages that `set` wrote under the same keys."""
        self._transfer("READ", self._places[keys[0]])
        return [True] * len(keys)

    def exists(self, keys: Sequence[str]) -> int:
        """Not measured: there is no index."""
        raise BenchError(f"nixl: no index to look {len(keys)} keys up in")

    def forget(self, keys: Sequence[str]) -> None:
        """Nothing to do: the file is bounded."""

    def close(self) -> None:
        """Deregister and close. Idempotent."""
        if self._agent is not None:
            for registration in self._registrations:
                self._agent.deregister_memory(registration)
            self._agent = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _transfer(self, operation: str, first_slot: int) -> None:
        agent, count = self._agent, self._addresses.size
        memory = np.zeros((count, 3), dtype=np.uint64)
        memory[:, 0] = self._addresses.reshape(-1)
        memory[:, 1] = self._length
        medium = np.empty((count, 3), dtype=np.uint64)
        start = first_slot * self._host.page_bytes
        medium[:, 0] = start + np.arange(count, dtype=np.uint64) * np.uint64(self._length)
        medium[:, 1] = self._length
        medium[:, 2] = self._fd
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(medium, "FILE"),
            "bench-bare",
        )
        try:
            deadline = time.monotonic() + _DEADLINE
            state = agent.transfer(handle)
            while state != "DONE":
                if state == "ERR" or time.monotonic() > deadline:
                    raise BenchError(f"nixl: {operation} of {count} segments ended as {state}")
                time.sleep(_POLL)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
