"""How often something that may happen all the time is spoken of."""

import threading
import time
from collections.abc import Callable

PAUSE_S = 10.0


class Pace:
    """Safe for threads.

    Args:
        pause_s: seconds between two times.
        clock: seconds, ever growing.
    """

    def __init__(
        self, pause_s: float = PAUSE_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pause_s = pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")

    def allows(self) -> bool:
        """True the first time, and then once after each pause."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return False
            self._next = now + self._pause_s
            return True
