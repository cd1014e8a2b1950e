"""Host pages that a caller lends to one call, and takes back when it no longer waits.

A call may go on after its caller has given up, on another thread. From then on it must not touch
the caller's host pages: they serve something else. This module owns that agreement and knows
nothing of pages.
"""

import contextlib
import threading
from collections.abc import Iterator


class Loan:
    """Safe for threads. Without `end` it lasts for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._over = False

    @property
    def is_over(self) -> bool:
        """Whether the caller has taken its pages back."""
        return self._over

    @contextlib.contextmanager
    def using(self) -> Iterator[bool]:
        """Around whatever reads or writes host pages: True if it may. Holds up `end` meanwhile."""
        with self._changed:
            may = not self._over
            self._users += may
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._users -= 1
                    self._changed.notify_all()

    def end(self) -> None:
        """Take the pages back: blocks until nobody uses them; nobody can afterwards. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: self._users == 0)
