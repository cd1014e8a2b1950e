"""Time as the file system tells it.

Hosts that share a file system may disagree about the time by hours. So all times in a store are
those of the file system: what it stamps on a file that was just written, carried on by this
process' monotonic clock. No host's wall clock is looked at, and none is compared with another's.
"""

import time


class FileClock:
    """The file system's time, as far as this process has seen it. Safe for threads."""

    def __init__(self) -> None:
        self._seen = (0, 0)

    def observe(self, mtime_ns: int) -> None:
        """Take the time of a file that was written just now."""
        self._seen = (mtime_ns, time.monotonic_ns())

    def now_ns(self) -> int:
        """ns since 1970, by the file system."""
        mtime_ns, at = self._seen
        return mtime_ns + time.monotonic_ns() - at
