"""What goes on behind the calls of a files store, on one thread: uses, the ledger, sweeping.

Every `interval_s` it stamps the pages that were used, tells what this process has added, and either
sweeps (`files_lease.py` says who) or reads what the sweeper told. Calls wait for nothing here but
for room, and that not for long.
"""

import logging
import threading
import time
from collections.abc import Callable

from hicache_nixl.pace import Pace
from hicache_nixl.stores.files_clock import FileClock
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FilesRoot, Owner
from hicache_nixl.stores.files_lease import Lease
from hicache_nixl.stores.files_ledger import Ledger, Usage, read_usage, write_usage
from hicache_nixl.stores.files_sweep import Sweeper
from hicache_nixl.stores.files_uses import Uses

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
_SWEEP_SHARE = 0.05
_BEHIND_S = 0.5
_TELL_EVERY_S = 0.25
_TROUBLE_LOG_PAUSE_S = 60.0
_CLOSE_WAIT_S = 5.0


class Housekeeper:
    """Runs until it is closed.

    Args:
        expiry_s: how long a sweeper may show no sign of life.
    """

    def __init__(
        self,
        root: FilesRoot,
        owner: Owner,
        *,
        ledger: Ledger,
        clock: FileClock,
        uses: Uses,
        crew: Crew,
        capacity_bytes: int,
        interval_s: float,
        expiry_s: float,
    ) -> None:
        self._root = root
        self._ledger = ledger
        self._clock = clock
        self._uses = uses
        self._crew = crew
        self._interval_s = interval_s
        self._lease = Lease(root.sweeper, owner, expiry_s=expiry_s)
        self._sweeper = Sweeper(
            root,
            owner,
            ledger,
            capacity_bytes=capacity_bytes,
            clock=clock,
            crew=crew,
            may_go_on=self._may_go_on,
            stamp_uses=uses.flush,
        )
        self._sweeps = False
        self._told_at = 0.0
        self._pace = Pace(_TROUBLE_LOG_PAUSE_S)
        self._changed = threading.Condition()
        self._rounds = 0
        self._hurry = False
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="hicache-nixl-files-house", daemon=True
        )
        self._thread.start()

    def refresh(self, deadline: float) -> None:
        """Read what the sweeper told last; blocks until `deadline` at most."""
        if not self._sweeps:
            for usage in self._crew.map(read_usage, [self._root.usage], deadline=deadline):
                if usage is not None:
                    self._ledger.adopt(usage)

    def hurry(self) -> None:
        """Do the next round now."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def wait_for_news(self, deadline: float) -> None:
        """Block until the usage may have changed, at most until `deadline`."""
        with self._changed:
            rounds = self._rounds
            self._changed.wait_for(
                lambda: self._rounds != rounds or self._closing,
                max(0.0, deadline - time.monotonic()),
            )

    def close(self) -> None:
        """Stamp what was used, let another process sweep, end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_WAIT_S)
        if self._thread.is_alive():
            logger.warning("the file system does not answer; last uses may be lost")

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            done = self._guarded(self._round)
            behind = done and self._sweeps and self._sweeper.is_behind()
            pause = min(time.monotonic() - began, self._interval_s) if behind else self._interval_s
            with self._changed:
                self._rounds += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._hurry or self._closing, pause)
                self._hurry = False
                if self._closing:
                    break
        self._guarded(self._uses.flush)
        self._guarded(lambda: self._ledger.publish(closed=True))
        self._guarded(self._lease.release)

    def _round(self) -> None:
        self._uses.flush()
        self._publish()
        held = self._lease.renew()
        if held and not self._sweeps:
            self._sweeper.begin(read_usage(self._root.usage))
        self._sweeps = held
        if not held:
            if (usage := read_usage(self._root.usage)) is not None:
                self._adopt(usage)
            return
        seconds = _BEHIND_S if self._sweeper.is_behind() else _SWEEP_SHARE * self._interval_s
        self._sweeper.round(seconds, told=self._tell)
        self._tell(self._sweeper.usage(), at_once=True)

    def _publish(self) -> None:
        if (mtime_ns := self._ledger.publish()) is not None:
            self._clock.observe(mtime_ns)

    def _may_go_on(self) -> bool:
        return self._lease.held and not self._closing

    def _tell(self, usage: Usage | None, at_once: bool = False) -> None:
        if usage is None:
            return
        self._adopt(usage)
        if at_once or time.monotonic() - self._told_at >= _TELL_EVERY_S:
            self._told_at = time.monotonic()
            write_usage(self._root.usage, usage)

    def _adopt(self, usage: Usage) -> None:
        self._uses.grain_ns = usage.grain_ns
        self._ledger.adopt(usage)
        with self._changed:
            self._rounds += 1
            self._changed.notify_all()

    def _guarded(self, work: Callable[[], object]) -> bool:
        try:
            work()
            return True
        except Exception as error:  # noqa: BLE001 - said below; without the thread nobody evicts
            if self._pace.allows():
                logger.warning("%s is not looked after for now: %s", self._root.directory, error)
            return False
