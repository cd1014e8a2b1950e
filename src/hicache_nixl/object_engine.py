"""Objects of a bucket through NIXL: an end for each, and an agent that is replaced when stuck.

An `ObjectEngine` is used like a `TransferEngine`, with names in place of extents. Behind it is one
agent at a time. When transfers are late, its threads may be stuck with them; then the next call
gets a new agent, and the old one is retired: polled until the last of its transfers has ended, and
only then destroyed. What a late transfer touches stays reserved until NIXL has told of its end,
whatever becomes of the agent. This module knows nothing of pages, stores and credentials.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.registrations import Descriptors, Registration
from hicache_nixl.transfer import CLOSE_WAIT_S, Operation, Transfer, TransferEngine

logger = logging.getLogger(__name__)

MAX_RETIRED = 4
"""Agents that may wait for the end of late transfers beside the one in use."""

_SHORT_WAIT_S = 200e-6
_LONG_WAIT_S = 2e-3
_RETIRED_WAIT_S = 0.1

Flags = npt.NDArray[np.bool_]


class ObjectTransfer:
    """Some objects on their way. Belongs to the thread that posted it until it is abandoned."""

    def __init__(
        self, engine: TransferEngine, objects: Registration, transfers: Sequence[Transfer]
    ) -> None:
        self._engine = engine
        self._objects = objects
        self._transfers = transfers

    @property
    def done(self) -> Flags:
        """Which have ended well, shape (n,)."""
        return np.array([transfer.done for transfer in self._transfers], np.bool_)

    @property
    def late(self) -> Flags:
        """Which have not ended, as of the last `wait`, shape (n,)."""
        return np.array([transfer.late for transfer in self._transfers], np.bool_)

    def wait(self, deadline: float) -> None:
        """Block until all have ended, at most until `deadline` (`time.monotonic`).

        Raises DeadlineExceededError with some in flight (wait again or `abandon`), or TransferError
        when some have ended badly.
        """
        for transfer in self._transfers:
            pause = _SHORT_WAIT_S
            while not self._ended(transfer) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(pause * 1.5, _LONG_WAIT_S)
        if late := int(self.late.sum()):
            raise DeadlineExceededError(
                f"{late} of {len(self._transfers)} objects did not move by their deadline"
            )
        self._engine.deregister(self._objects)
        errors = [transfer.error for transfer in self._transfers if transfer.error is not None]
        if errors:
            raise TransferError(
                f"{len(errors)} of {len(self._transfers)} objects did not move: {errors[0]}"
            )

    def abandon(self, on_end: Callable[[], None]) -> None:
        """Hand what is late to the engine, which calls `on_end` once all have ended. As
        `Transfer.abandon`."""

        def on_last_end() -> None:
            self._engine.deregister(self._objects)
            on_end()

        self._engine.abandon([one for one in self._transfers if one.late], on_last_end)

    def _ended(self, transfer: Transfer) -> bool:
        try:
            return transfer.poll()
        except TransferError:
            return True


@dataclass(frozen=True, eq=False)
class _Agent:
    engine: TransferEngine
    memory: dict[Registration, Registration]
    """The engine's registration of each that was given out."""

    def register(self, given: Registration) -> None:
        self.memory[given] = self.engine.register_memory(given.start, given.nbytes)

    def deregister(self, given: Registration) -> None:
        if (registration := self.memory.pop(given, None)) is not None:
            self.engine.deregister(registration)

    def close(self) -> None:
        """Destroy it; it has no transfer in flight. Takes 0.1 s."""
        for registration in list(self.memory):
            self.deregister(registration)
        self.engine.close()


class ObjectEngine:
    """Moves whole objects between registered memory and a bucket. Safe for threads.

    Args:
        plugin: "OBJ" or "AZURE_BLOB".
        parameters: what the plug-in is created with. Their values are never shown.

    Raises TransferError when the plug-in cannot start; no server is asked.
    """

    always_staged = True
    """Memory is touched by failed and late transfers, so host pages must not be given to it."""

    def __init__(self, plugin: str, parameters: dict[str, str]) -> None:
        self._plugin = plugin
        self._parameters = dict(parameters)
        self._lock = threading.RLock()
        self._given: list[Registration] = []
        self._retired: list[_Agent] = []
        self._reaper: threading.Thread | None = None
        self._outdated = False
        self._closed = False
        self._agent: _Agent | None = self._new_agent()
        _engines.add(self)

    @property
    def requests(self) -> int:
        """How many requests the plug-in has in flight at once; others wait their turn."""
        return int(self._parameters.get("num_threads", max(1, (os.cpu_count() or 2) // 2)))

    @property
    def late_transfers(self) -> int:
        """Abandoned transfers that have not ended yet."""
        with self._lock:
            return sum(agent.engine.late_transfers for agent in self._agents())

    @property
    def retired_agents(self) -> int:
        """Agents that are destroyed as soon as the last of their transfers has ended."""
        return len(self._retired)

    def replace(self, parameters: dict[str, str]) -> None:
        """Use other parameters, such as new credentials, from the next call on. Returns at once;
        what is in flight goes on with the old ones.

        While MAX_RETIRED agents wait for late transfers, the old parameters stay in use.
        """
        with self._lock:
            self._parameters = dict(parameters)
            self._outdated = True

    def register_memory(self, address: int, nbytes: int) -> Registration:
        """Let transfers touch `nbytes` of host memory at `address`. As that of TransferEngine."""
        given = Registration(None, start=address, nbytes=nbytes)
        with self._lock:
            self._ready().register(given)
            self._given.append(given)
        return given

    def deregister(self, registration: Registration) -> None:
        """End a registration. A second call does nothing.

        An agent with transfers in flight keeps it until it is destroyed: they go on.
        """
        with self._lock:
            if registration in self._given:
                self._given.remove(registration)
            if self._agent is not None and self._agent.engine.is_idle:
                self._agent.deregister(registration)

    def post(
        self, operation: Operation, memory: Descriptors, names: Sequence[str]
    ) -> ObjectTransfer:
        """Start moving memory[i], all of one length, to the whole object names[i] (WRITE) or from
        its start (READ). Returns at once, unless an agent must be made, which takes 0.1 s at most.

        Raises TransferError, with nothing started, when memory lies in no registration, or no agent
        can be made.
        """
        with self._lock:
            engine = self._ready().engine
            nbytes = int(memory[0, 1])
            objects = engine.register_objects(names, nbytes)
            place = np.zeros_like(memory)
            place[:, 1] = nbytes
            place[:, 2] = objects.devices
            try:
                transfers = engine.post_each(operation, memory, place)
            except BaseException:
                engine.deregister(objects)
                raise
        return ObjectTransfer(engine, objects, transfers)

    def drain(self, *, wait_s: float = CLOSE_WAIT_S) -> bool:
        """Take no more transfers and wait up to `wait_s` seconds for those in flight; True if
        none is left. Idempotent."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
            agents = self._agents()
        return all(
            agent.engine.drain(wait_s=max(0.0, deadline - time.monotonic())) for agent in agents
        )

    def close(self) -> None:
        """Destroy the agent, and the retired ones, each when it has no transfer in flight: now or
        later, on another thread. Blocks for 0.1 s an agent. Idempotent."""
        with self._lock:
            self._closed = True
            self._retire()
        if not self._reap():
            with self._lock:
                self._start_reaper()

    def _reap(self) -> bool:
        """Destroy retired agents that are idle; True if none is left."""
        with self._lock:
            idle = [agent for agent in self._retired if agent.engine.drain(wait_s=0)]
            self._retired = [agent for agent in self._retired if agent not in idle]
            none_left = not self._retired
        for agent in idle:
            agent.close()
        return none_left

    def _reap_until_none(self) -> None:
        while True:
            self._reap()
            with self._lock:
                if not self._retired:
                    self._reaper = None
                    return
            time.sleep(_RETIRED_WAIT_S)

    # -- agents; the lock is held ---------------------------------------------------------------

    def _agents(self) -> list[_Agent]:
        return [*self._retired, *([] if self._agent is None else [self._agent])]

    def _ready(self) -> _Agent:
        """The agent for what is posted next: a new one if this one is outdated or has late
        transfers, and not too many wait already."""
        if self._closed:
            raise TransferError("the object engine is closed")
        if self._agent is not None and len(self._retired) < MAX_RETIRED:
            late = self._agent.engine.late_transfers
            if late or self._outdated:
                logger.info("NIXL's %s agent is replaced (%d late transfers)", self._plugin, late)
                self._retire()
                self._start_reaper()
        if self._agent is None:
            self._agent = self._new_agent()
        return self._agent

    def _new_agent(self) -> _Agent:
        agent = _Agent(TransferEngine(self._plugin, self._parameters), {})
        for registration in self._given:
            agent.register(registration)
        self._outdated = False
        return agent

    def _retire(self) -> None:
        if self._agent is not None:
            self._retired.append(self._agent)
            self._agent = None

    def _start_reaper(self) -> None:
        if self._reaper is None:
            self._reaper = threading.Thread(
                target=self._reap_until_none, name="hicache-nixl-retired", daemon=True
            )
            self._reaper.start()


_engines: weakref.WeakSet[ObjectEngine] = weakref.WeakSet()


@atexit.register  # later than that of `transfer`, so it runs before it
def _keep_threads_out() -> None:
    """As that of `transfer`: who holds one of its locks must not be waited for here."""
    for engine in list(_engines):
        engine._lock.acquire()
