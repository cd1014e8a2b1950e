"""One opening of a slab store's directories: index, segments, space, and who is at work with them.

The directories of a running server can go away: unmounted, moved, removed. What is open then lives
on without a name, and pages put there would be lost. So an opening knows which directories it is
of; when they are others, the store lets go of it and makes a new one once they are back.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.stores.base import Direction
from hicache_nixl.stores.directory import read_block, write_and_read_back
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_root import SlabRoot
from hicache_nixl.stores.slab_segments import SegmentTable
from hicache_nixl.stores.slab_space import SlabSpace
from hicache_nixl.stores.slab_sql import Touch
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

_TOUCHES_LIMIT = 65536


class LastUses:
    """Uses of pages that are still to be written down. Safe for threads, bounded in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_tick = 0
        self._touched: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        return len(self._touched)

    def saw(self, tick: int) -> None:
        """Pages were written with that tick: uses come after it, also if the clock was set back."""
        with self._lock:
            self._last_tick = max(self._last_tick, tick)

    def note(self, number: int, keys: Sequence[bytes]) -> None:
        """Pages of a namespace are used now."""
        with self._lock:
            self._last_tick = tick = max(time.time_ns(), self._last_tick + 1)
            if len(self._touched) < _TOUCHES_LIMIT:
                self._touched.update(((number, key), tick) for key in keys)

    def take(self) -> list[Touch]:
        """All of them; whoever takes them writes them down."""
        with self._lock:
            touches = [(number, key, tick) for (number, key), tick in self._touched.items()]
            self._touched.clear()
        return touches

    def flush(self, index: SlabIndex, deadline: float | None = None) -> None:
        """Write them down. What cannot be written is kept. Raises StoreError."""
        touches = self.take()
        if not touches:
            return
        try:
            index.touch(touches, deadline=deadline)
        except StoreError:
            with self._lock:
                for number, key, tick in touches:
                    self._touched.setdefault((number, key), tick)
            raise


class SlabOpening:
    """Safe for threads, not for forks.

    Args:
        store: which store it must be; None to take what is there or make one.
        capacity_bytes, segment_bytes, engines, direct_io, busy_timeout_s: see `SlabStore`.

    Raises StoreError.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        store: str | None = None,
        capacity_bytes: int,
        segment_bytes: int,
        engines: Sequence[TransferEngine],
        direct_io: bool,
        busy_timeout_s: float,
    ) -> None:
        self.root = SlabRoot(directories)
        if store is None:
            self.root.prepare()
        else:
            self.root.rejoin(store)
        self.index = self.root.open_index(busy_timeout_s=busy_timeout_s)
        self.segments = SegmentTable(directories, engines, direct_io, self.index.segment)
        self.space = SlabSpace(
            self.root,
            self.index,
            self.segments,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
        )
        self.uses = LastUses()
        self._direct_io = direct_io
        self._numbers: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        try:
            self._identity = self._identify()
            self.space.shrink_to_budget()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise StoreError(f"{self.root.first} cannot be used: {error}") from error
            raise

    # -- namespaces ---------------------------------------------------------------------------

    def add_namespace(self, namespace: Namespace) -> None:
        """Give a namespace a number, and keep its manifest beside the pages."""
        self.root.note_namespace(namespace)
        self._numbers[namespace.digest] = self.index.add_namespace(namespace)

    def number(self, namespace: bytes) -> int:
        """The number of a namespace. Raises RegistrationError if it is not open."""
        try:
            return self._numbers[namespace]
        except KeyError:
            raise RegistrationError(
                f"namespace {namespace.hex()[:12]} is not open; call open_namespace first"
            ) from None

    # -- who is at work -----------------------------------------------------------------------

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Around a call."""
        done = self.hold()
        try:
            yield
        finally:
            done()

    def hold(self) -> Callable[[], None]:
        """Be at work until the returned function is called."""
        with self._lock:
            self._users += 1

        def done() -> None:
            with self._lock:
                self._users -= 1
            self._sign_out_if_done()

        return done

    def close(self) -> None:
        """Release files. Idempotent.

        While somebody is at work, or a late write under way, this process goes on being known as a
        writer, so that nobody gets those slots.
        """
        self.segments.close()
        self.index.close()
        with self._lock:
            self._closed = True
        self._sign_out_if_done()

    def _sign_out_if_done(self) -> None:
        with self._lock:
            if self._closed and self._users == 0:
                self.root.sign_out()

    # -- how the directories are --------------------------------------------------------------

    def is_there(self) -> bool:
        """Whether the directories are still those that were opened, as far as can be told."""
        try:
            return self._identify() == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _identify(self) -> list[tuple[int, int]]:
        facts = [path.stat() for path in (*self.root.directories, self.index.path)]
        return [(fact.st_dev, fact.st_ino) for fact in facts]

    def check(self, direction: Direction, *, deadline: float) -> None:
        """See `Store.check`. One directory that works is enough: a call then has some pages."""
        if direction == "read":
            self.index.allocated_bytes()
        else:
            self.index.touch((), deadline=deadline)
        troubles = []
        for number, directory in enumerate(self.root.directories):
            try:
                if direction == "read":
                    self._read_block(number)
                else:
                    write_and_read_back(directory, direct_io=self._direct_io)
            except OSError as error:
                troubles.append(f"{directory}: {error.strerror or error}")
            else:
                return
        raise StoreError(f"{direction} does not work in {'; '.join(troubles)}")

    def _read_block(self, number: int) -> None:
        """Read a block of some segment of a directory, or what describes the directory."""
        directory = self.root.directories[number]
        paths = [
            segment.path(self.root.directories)
            for segment in self.index.segments()
            if segment.directory == number
        ]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                read_block(path, direct_io=self._direct_io)
                return
        read_block(directory / "store.json", direct_io=self._direct_io)
