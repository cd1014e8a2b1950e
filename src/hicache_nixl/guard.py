"""Stands before a store: every call ends by its deadline, and a sick store is spared.

A call runs on another thread (`workers.py`). A caller that gives up at its deadline takes its host
pages back (`loan.py`) and gets misses; what goes on touches them no more. One case holds a caller
longer: a read in place whose kernel I/O does not end, because the kernel may still write into its
host pages.

Two circuits (`circuit.py`), one for reading and one for writing, open after errors in a row or one
call in which nothing moved. While a circuit is open its calls are misses at once, and a thread asks
`Store.check` now and then; the circuit closes when that works. Must not know: SGLang, what a store
is made of.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from hicache_nixl.batch import Batch
from hicache_nixl.circuit import BACKOFF_S, Circuit, CircuitState
from hicache_nixl.errors import StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.loan import Loan
from hicache_nixl.metrics import Meter
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import Direction, Flags, Store
from hicache_nixl.workers import OverdueError, Workers

logger = logging.getLogger(__name__)

THREADS = 32
_CHECK_THREADS = 4
_CHECK_S = 5.0
_RESERVE = (0.1, 0.5)
"""A store gets this part less of the time than the caller has, at most these seconds, so that what
it finished is still told."""

T = TypeVar("T")


@dataclass(frozen=True)
class GuardState:
    """How a store is doing."""

    read: CircuitState
    write: CircuitState
    overdue_calls: int
    """Calls that did not end by their deadline, since start."""
    stuck_threads: int
    """Those of them that have not ended yet."""


class Guard:
    """Safe for threads. Makes no thread before it needs one. What a call raises is misuse
    (RegistrationError), never trouble with storage, but where it says so.

    Args:
        store: whose calls are guarded; it stays its owner's to close.
        deadline_s: seconds for calls that name no deadline.
        meter: counts what became a miss and why.
        threads: how many calls of the store there may be at once.
        backoff_s: see `Circuit`.
        rand: see `Circuit`.
    """

    def __init__(
        self,
        store: Store,
        *,
        deadline_s: float = 10.0,
        meter: Meter | None = None,
        threads: int = THREADS,
        backoff_s: tuple[float, float] = BACKOFF_S,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.meter = meter or Meter()
        self._store = store
        self._deadline_s = deadline_s
        self._workers = Workers(threads, "hicache-nixl-call")
        self._checkers = Workers(_CHECK_THREADS, "hicache-nixl-check")
        self._circuits: dict[Direction, Circuit] = {
            "read": Circuit("read", backoff_s=backoff_s, rand=rand),
            "write": Circuit("write", backoff_s=backoff_s, rand=rand),
        }
        self._lock = threading.Lock()
        self._watchers: dict[Direction, threading.Thread] = {}
        self._closing = threading.Event()

    # -- calls that become misses -----------------------------------------------------------------

    def get(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """As `Store.get`. Blocks until `deadline`, with the exception that this module names."""
        return self._move("get", "read", self._store.get, mover, batch, prefix, deadline)

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """As `Store.put`. Blocks until `deadline`. Pages that are False may be stored later."""
        return self._move("set", "write", self._store.put, mover, batch, prefix, deadline)

    def exists(
        self, namespace: bytes, keys: Sequence[bytes], *, deadline: float | None = None
    ) -> int:
        """As `Store.exists`; 0 if it cannot be told by `deadline`."""
        if deadline is None:
            deadline = time.monotonic() + self._deadline_s
        work = partial(self._store.exists, namespace, keys)
        return self._guarded("exists", "read", lambda _: work(), 0, deadline)

    def present(
        self, namespace: bytes, keys: Sequence[bytes], *, deadline: float | None = None
    ) -> Flags:
        """As `Store.present`; none if it cannot be told by `deadline`."""
        if deadline is None:
            deadline = time.monotonic() + self._deadline_s
        work = partial(self._store.present, namespace, keys)
        none = np.zeros(len(keys), np.bool_)
        return self._guarded("exists", "read", lambda _: work(), none, deadline)

    def _move(
        self,
        name: str,
        direction: Direction,
        operation: Callable[..., Flags],
        mover: RecordMover,
        batch: Batch,
        prefix: Sequence[bytes],
        deadline: float,
    ) -> Flags:
        none = np.zeros(len(batch.keys), np.bool_)
        if not len(none):
            return none

        def work(until: float) -> Flags:
            flags = operation(mover, batch, prefix, deadline=until)
            if time.monotonic() >= until and not flags.any():
                raise OverdueError("nothing moved until the deadline")
            return flags

        return self._guarded(name, direction, work, none, deadline, batch.loan)

    def _guarded(
        self,
        name: str,
        direction: Direction,
        work: Callable[[float], T],
        miss: T,
        deadline: float,
        loan: Loan | None = None,
    ) -> T:
        circuit = self._circuits[direction]
        if not circuit.allows():
            return miss
        left = deadline - time.monotonic()
        if left <= 0:
            return miss
        share, most = _RESERVE
        until = deadline - min(share * left, most)
        try:
            result = self._workers.run(partial(work, until), deadline)
        except OSError as error:  # of the library's own, StoreError and TransferError are such
            if loan is not None:
                loan.end()
            overdue = time.monotonic() >= until
            self.meter.trouble(name, error, overdue=overdue)
            # A call that had little time left says little about storage.
            at_once = overdue and left >= self._deadline_s / 2
            if circuit.failed(name, str(error), at_once=at_once):
                self._watch(circuit)
            return miss
        circuit.succeeded(name)
        return result

    # -- calls that raise -------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace) -> None:
        """As `Store.open_namespace`, with a deadline. Raises StoreError or RegistrationError."""
        self._limited(lambda _: self._store.open_namespace(namespace))

    def clear(self, namespace: bytes, *, deadline: float | None = None) -> int:
        """As `Store.clear`, whatever the circuits say. Raises StoreError."""
        return self._limited(
            lambda until: self._store.clear(namespace, deadline=until), deadline=deadline
        )

    def _limited(self, work: Callable[[float], T], *, deadline: float | None = None) -> T:
        left = self._deadline_s if deadline is None else deadline - time.monotonic()
        deadline = time.monotonic() + left
        share, most = _RESERVE
        try:
            return self._workers.run(
                partial(work, deadline - min(share * max(0.0, left), most)), deadline
            )
        except OverdueError as error:
            raise StoreError(f"{error}; see whether the store's disk or server is well") from error

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> GuardState:
        """How the store is doing; does not ask it."""
        return GuardState(
            self._circuits["read"].state(),
            self._circuits["write"].state(),
            self.meter.overdue_calls,
            self._workers.stuck,
        )

    def close(self) -> None:
        """End the threads; waits up to 5 s for calls under way. Idempotent."""
        self._closing.set()
        self._workers.close()
        self._checkers.close()
        with self._lock:
            watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.join()

    # -- recovery ---------------------------------------------------------------------------------

    def _watch(self, circuit: Circuit) -> None:
        """Check the store until it works; one thread a circuit."""
        with self._lock:
            if circuit.direction in self._watchers or self._closing.is_set():
                return
            thread = threading.Thread(
                target=self._check_until_closed,
                args=(circuit,),
                name="hicache-nixl-watch",
                daemon=True,
            )
            self._watchers[circuit.direction] = thread
            thread.start()

    def _check_until_closed(self, circuit: Circuit) -> None:
        while not self._closing.wait(circuit.delay_s()):
            circuit.checking()
            limit = min(self._deadline_s, _CHECK_S)
            try:
                self._checkers.run(partial(self._check, circuit, limit), time.monotonic() + limit)
            except Exception as error:  # noqa: BLE001 - kept; without this thread it stays open
                circuit.check_failed(str(error) or type(error).__name__)
            with self._lock:
                if circuit.is_closed:
                    del self._watchers[circuit.direction]
                    return

    def _check(self, circuit: Circuit, limit: float) -> None:
        """Closes the circuit even if nobody waits for the answer any more."""
        self._store.check(circuit.direction, deadline=time.monotonic() + limit)
        circuit.recovered()
