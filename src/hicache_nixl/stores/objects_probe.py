"""Small objects through NIXL, to try whether the way that pages take works."""

import logging
import threading
from collections.abc import Callable

import numpy as np

from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.memory import HostBuffer, allocate
from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.record import ALIGNMENT
from hicache_nixl.registrations import Registration
from hicache_nixl.transfer import Operation

logger = logging.getLogger(__name__)

NBYTES = ALIGNMENT
_SLOTS = 8
_kept: list[HostBuffer] = []
"""Memory of probers that were closed while NIXL may still write into it; never given back."""


class Prober:
    """Moves one small object, from and to memory of its own. Safe for threads.

    A probe that is late keeps its part of that memory until NIXL tells of its end.
    """

    def __init__(self, reader: ObjectEngine, writer: ObjectEngine) -> None:
        self._engines = {"READ": reader, "WRITE": writer}
        self._memory = allocate(_SLOTS * NBYTES)  # outlives Python, as requests may
        self._view = self._memory.view()[: _SLOTS * NBYTES].reshape(_SLOTS, NBYTES)
        self._lock = threading.Lock()
        self._free = list(range(_SLOTS))
        address = self._view.ctypes.data
        self._registrations: list[tuple[ObjectEngine, Registration]] = [
            (engine, engine.register_memory(address, _SLOTS * NBYTES))
            for engine in (reader, writer)
        ]

    def write(self, name: str, content: bytes, *, deadline: float) -> None:
        """Make or replace an object of NBYTES. Raises TransferError, DeadlineExceededError."""

        def fill(slot: int) -> None:
            self._view[slot] = np.frombuffer(content, np.uint8)

        self._move("WRITE", name, deadline, fill)

    def read(self, name: str, *, deadline: float) -> bytes:
        """The first NBYTES of an object, with zeros behind a shorter one. Raises as `write`."""

        def empty(slot: int) -> None:
            self._view[slot] = 0

        return self._move("READ", name, deadline, empty)

    def _move(
        self, operation: Operation, name: str, deadline: float, prepare: Callable[[int], None]
    ) -> bytes:
        with self._lock:
            if not self._free:
                raise TransferError(f"{_SLOTS} probes are late and have not ended yet")
            slot = self._free.pop()
        ended = True
        try:
            prepare(slot)
            memory = np.array([[self._view[slot].ctypes.data, NBYTES, 0]], np.uint64)
            transfer = self._engines[operation].post(operation, memory, [name])
            try:
                transfer.wait(deadline)
            except DeadlineExceededError:
                ended = False
                transfer.abandon(lambda: self._free.append(slot))
                raise
            moved: bytes = self._view[slot].tobytes()
            return moved
        finally:
            if ended:
                self._free.append(slot)

    def close(self) -> None:
        """End the registrations. Idempotent."""
        while self._registrations:
            engine, registration = self._registrations.pop()
            try:
                engine.deregister(registration)
            except TransferError as error:
                logger.warning("%s", error)
        if len(self._free) < _SLOTS and self._memory not in _kept:
            _kept.append(self._memory)
