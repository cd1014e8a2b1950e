"""How fast pages moved, and what went wrong. Knows numbers only."""

import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from hicache_nixl.pace import Pace

logger = logging.getLogger(__name__)

_KEPT_SAMPLES = 4096


@dataclass
class Measured:
    """One call; its user sets `hits` and, where pages moved, the payload bytes of these."""

    pages: int
    hits: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Meter:
    """Times calls. Safe for threads; never blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[str, deque[tuple[int, float]]] = {
            "get": deque(maxlen=_KEPT_SAMPLES),
            "set": deque(maxlen=_KEPT_SAMPLES),
        }
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self.overdue_calls = 0
        """Calls that did not end by their deadline."""

    @contextlib.contextmanager
    def exists(self, pages: int) -> Iterator[Measured]:
        """Around one exists call."""
        with self._measure("exists", pages) as measured:
            yield measured

    @contextlib.contextmanager
    def moving(self, name: str, pages: int) -> Iterator[Measured]:
        """Around one get or set call."""
        with self._measure(name, pages) as measured:
            yield measured
        if measured.hits and measured.seconds > 0:
            rate = measured.nbytes / measured.seconds / 1e9
            self._samples[name].append((measured.hits, rate))

    @contextlib.contextmanager
    def _measure(self, name: str, pages: int) -> Iterator[Measured]:
        measured = Measured(pages)
        start = time.perf_counter()
        try:
            yield measured
        finally:
            measured.seconds = time.perf_counter() - start
        logger.debug(
            "%s: %d of %d pages in %.3f ms", name, measured.hits, pages, measured.seconds * 1e3
        )

    def trouble(self, name: str, error: Exception, *, overdue: bool = False) -> None:
        """Say that an error became a miss, at most every ten seconds."""
        with self._lock:
            self.overdue_calls += overdue
            is_told = self._paces[name].allows()
        if is_told:
            logger.error("%s became a miss: %s", name, error)

    def drain(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """(pages, GB/s) of every get and set call since the last drain."""
        drained = []
        for name in ("get", "set"):
            samples = self._samples[name]
            drained.append([samples.popleft() for _ in range(len(samples))])
        return drained[0], drained[1]
