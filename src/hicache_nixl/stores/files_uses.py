"""When pages were used last: the modification times of their files, and which are to be set.

A call that uses pages uses those before them in their prefix, too, and all of them get one time,
minus a microsecond for each page that lies before. Ordered by it, the pages used longest ago come
first, among these the deepest, so that eviction leaves no prefix without its front.

A page is not stamped again while its time is younger than the grain, a sixteenth of the age of the
oldest page in the store; what follows such a page in its prefix then gets the same time, not a
later one. So stamps are rare and last uses known to about 6 %. They are set behind the calls.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence

from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FilesRoot, page_path

FINEST_GRAIN_NS = 50 * 10**6
COARSEST_GRAIN_NS = 600 * 10**9
_GRAINS = 16
_DEPTH_NS = 1000
_DEEPEST = 1 << 20
_LIMIT = 65536
_WIDTH = 8
_FLUSH_LIMIT_S = 30.0

_Page = tuple[bytes, bytes]


def grain_for(span_ns: int) -> int:
    """The grain for a store whose oldest page was used `span_ns` ago."""
    return min(max(span_ns // _GRAINS, FINEST_GRAIN_NS), COARSEST_GRAIN_NS)


def stamp(used_ns: int, depth: int) -> int:
    """The time of a page with `depth` pages before it, in ns."""
    return used_ns - min(depth, _DEEPEST) * _DEPTH_NS


class Uses:
    """Notes uses; `flush` stamps them. Safe for threads, bounded in memory.

    What does not find room, or cannot be stamped, only makes a page look older than it is.
    """

    def __init__(self, root: FilesRoot, clock: FileClock, crew: Crew) -> None:
        self._root = root
        self._clock = clock
        self._crew = crew
        self._lock = threading.Lock()
        self._waiting: dict[_Page, tuple[int, int]] = {}
        self._known: dict[_Page, int] = {}
        self.grain_ns = FINEST_GRAIN_NS

    def note(
        self,
        namespace: bytes,
        prefix: Sequence[bytes],
        pages: Iterable[tuple[bytes, int, int]],
    ) -> int:
        """A call uses pages: their keys, how many pages lie before each, and their time on file.

        `prefix` are the keys before them. Returns the time for pages that the call is to add.
        """
        now = self._clock.now_ns()
        due = now - self.grain_ns
        used = [(key, depth) for depth, key in enumerate(prefix)]
        with self._lock:
            if len(self._known) > _LIMIT:
                self._known.clear()
            for key, depth, mtime_ns in pages:
                self._known[namespace, key] = mtime_ns + min(depth, _DEEPEST) * _DEPTH_NS
                used.append((key, depth))
            times = [self._known.get((namespace, key), 0) for key, _ in used]
            used_ns = min([now, *(known for known in times if known >= due)])
            for (key, depth), known in zip(used, times, strict=True):
                if known < due and len(self._waiting) < _LIMIT:
                    self._known[namespace, key] = used_ns
                    self._waiting[namespace, key] = (used_ns, depth)
        return used_ns

    def added(self, namespace: bytes, keys: Iterable[bytes], used_ns: int) -> None:
        """Pages were stored with that time."""
        with self._lock:
            self._known.update(((namespace, key), used_ns) for key in keys)

    def flush(self) -> None:
        """Stamp what is waiting. Blocks, at most half a minute."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        deadline = time.monotonic() + _FLUSH_LIMIT_S
        self._crew.map(self._set, list(waiting.items()), deadline=deadline, width=_WIDTH)

    def _set(self, waiting: tuple[_Page, tuple[int, int]]) -> bool:
        (namespace, key), (used_ns, depth) = waiting
        path = self._root.namespace_directory(namespace) / page_path(key)
        mtime_ns = stamp(used_ns, depth)
        try:
            if path.lstat().st_mtime_ns >= mtime_ns:
                return False
            os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        except OSError:  # it is gone, or another user's
            return False
        return True
