"""A circuit: whether calls of a store make sense now, for reading or for writing.

    closed ── failures in a row, or one timeout ──> open ── delay ──> half-open
       ^                                             ^                   │ one check
       └──────────────────── works ──────────────────┼───────────────────┤
                                                     └───── fails ───────┘

It keeps the state and says when to try. Who calls, and what a check is, it does not know.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hicache_nixl.stores.base import Direction

logger = logging.getLogger(__name__)

State = Literal["closed", "open", "half-open"]

FAILURES = 3
BACKOFF_S = (1.0, 10.0)
"""Seconds before the first check, and at most."""
_JITTER = 0.2
_CALM_S = 30.0
"""A circuit that opens again sooner than this goes on with the delays it had."""
_DOUBLINGS = 16


@dataclass(frozen=True)
class CircuitState:
    """How a circuit stands."""

    direction: Direction
    state: State
    since: float
    """Seconds since 1970 at which it closed or opened last."""
    failures: int
    """Calls of one kind that failed in a row."""
    skipped: int
    """Calls that were a miss at once, since start."""
    opened: int
    """How often it opened, since start."""
    reason: str
    """Of the last failure, empty if there was none."""


class Circuit:
    """Safe for threads; never blocks. It starts closed.

    Args:
        direction: which calls it is for.
        failures: how many of one kind of call in a row open it.
        backoff_s: seconds before the first check after it opened, which double, and the most.
        clock: `time.monotonic`, or one for tests.
        rand: a number from 0 to 1, for the jitter.
    """

    def __init__(
        self,
        direction: Direction,
        *,
        failures: int = FAILURES,
        backoff_s: tuple[float, float] = BACKOFF_S,
        clock: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self.direction: Direction = direction
        self._threshold = failures
        self._backoff_s = backoff_s
        self._clock = clock
        self._rand = rand
        self._lock = threading.Lock()
        self._state: State = "closed"
        self._since = time.time()
        self._changed_at = -_CALM_S
        self._failures: dict[str, int] = {}
        self._skipped = 0
        self._skipped_before = 0
        self._opened = 0
        self._doublings = 0
        self._reason = ""

    @property
    def is_closed(self) -> bool:
        """Whether calls are let through."""
        return self._state == "closed"

    def allows(self) -> bool:
        """Whether a call is let through; one that is not is counted."""
        if self._state == "closed":
            return True
        with self._lock:
            self._skipped += 1
        return False

    def succeeded(self, call: str) -> None:
        """A kind of call did what it should: that says nothing of other kinds."""
        if call in self._failures and self._state == "closed":
            with self._lock:
                if self._state == "closed":
                    self._failures.pop(call, None)

    def failed(self, call: str, reason: str, *, at_once: bool = False) -> bool:
        """A kind of call failed; whether the circuit opened, which `at_once` makes it do."""
        with self._lock:
            if self._state != "closed":
                return False
            self._failures[call] = self._failures.get(call, 0) + 1
            self._reason = reason
            if self._failures[call] < self._threshold and not at_once:
                return False
            again = self._clock() - self._changed_at < _CALM_S
            self._doublings = min(self._doublings + 1, _DOUBLINGS) if again else 0
            self._opened += 1
            self._skipped_before = self._skipped
            self._change("open")
        logger.warning("storage: %s is suspended until it works again: %s", self._what(), reason)
        return True

    def delay_s(self) -> float:
        """Seconds to wait before the next check."""
        first, most = self._backoff_s
        with self._lock:
            delay = min(first * float(2**self._doublings), most)
        return delay * (1 + _JITTER * (2 * self._rand() - 1))

    def checking(self) -> None:
        """A check begins."""
        with self._lock:
            if self._state == "open":
                self._state = "half-open"

    def check_failed(self, reason: str) -> None:
        """A check has failed: the next one comes later."""
        with self._lock:
            if self._state == "closed":
                return
            self._state = "open"
            self._doublings = min(self._doublings + 1, _DOUBLINGS)
            self._reason = reason

    def recovered(self) -> None:
        """A check has shown that it works."""
        with self._lock:
            if self._state == "closed":
                return
            seconds = self._clock() - self._changed_at
            skipped = self._skipped - self._skipped_before
            self._failures.clear()
            self._change("closed")
        logger.warning(
            "storage: %s works again after %.1f s; %d calls were misses meanwhile",
            self._what(),
            seconds,
            skipped,
        )

    def state(self) -> CircuitState:
        """How it stands now."""
        with self._lock:
            return CircuitState(
                self.direction,
                self._state,
                self._since,
                max(self._failures.values(), default=0),
                self._skipped,
                self._opened,
                self._reason,
            )

    def _change(self, state: State) -> None:
        self._state = state
        self._since = time.time()
        self._changed_at = self._clock()

    def _what(self) -> str:
        return "reading" if self.direction == "read" else "writing"
