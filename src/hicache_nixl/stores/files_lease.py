"""Who sweeps: one process among all that share a store, as long as it shows that it is alive.

    <directory>/sweeper/<epoch>    {"holder": owner, "beat": number}

The file with the highest epoch names the sweeper, which writes a new beat into it. Whoever sees
the same beat for longer than `expiry_s` by its own monotonic clock creates the next epoch, which
succeeds for one process only. No time is compared between hosts, so their clocks may differ.

A shared file system may show a directory as it was a minute ago, so that for as long two processes
may think they sweep. That costs work and takes some pages more than needed; nothing else depends
on there being one.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from hicache_nixl.stores.files_layout import Owner, names_in

logger = logging.getLogger(__name__)

EXPIRY_S = 30.0
_CONTENT_BYTES = 256  # always as many, so that a file is never seen half replaced


class Lease:
    """One process' part in the election. Belongs to one thread.

    Args:
        directory: of the epochs; it exists.
        owner: who this is.
        expiry_s: how long a beat counts.
        monotonic: the clock of this process, in seconds.
    """

    def __init__(
        self,
        directory: Path,
        owner: Owner,
        *,
        expiry_s: float = EXPIRY_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._expiry_s = expiry_s
        self._monotonic = monotonic
        self._epoch: int | None = None
        self._beat = 0
        self._beaten_at = 0.0
        self._seen: tuple[int, str] | None = None
        self._seen_at = 0.0

    @property
    def held(self) -> bool:
        """Whether this process sweeps, and nobody can think yet that it has died."""
        return self._epoch is not None and self._monotonic() - self._beaten_at < self._expiry_s / 2

    def renew(self) -> bool:
        """Look once: beat if held, take it if it is free. Whether it is held. Raises OSError."""
        epochs = self._epochs()
        top = epochs[-1] if epochs else 0
        if self._epoch is not None and top != self._epoch:
            logger.info("another process sweeps now: epoch %d instead of %d", top, self._epoch)
            self._epoch = None
        if self._epoch is not None:
            self._write(self._epoch, 0)
        elif self._is_free(top):
            self._take(top + 1, epochs)
        return self.held

    def release(self) -> None:
        """Let the next one take it at once. Raises OSError."""
        if self._epoch is not None and self._epochs()[-1:] == [self._epoch]:
            epoch, self._epoch = self._epoch, None
            path = self._directory / _name(epoch)
            path.write_text(json.dumps({"holder": None}))

    def _is_free(self, top: int) -> bool:
        content = self._read(top) if top else ""
        now = self._monotonic()
        if (top, content) != self._seen:
            self._seen, self._seen_at = (top, content), now
        if not top or now - self._seen_at > self._expiry_s:
            return True
        try:
            holder = json.loads(content)["holder"]
        except (ValueError, TypeError, KeyError):  # it is being written, or its writer has died
            return False
        return holder is None or self._owner.knows_dead(str(holder))

    def _take(self, epoch: int, older: list[int]) -> None:
        try:
            self._write(epoch, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        self._epoch = epoch
        logger.info("sweeping this store from now on (epoch %d)", epoch)
        for old in older:
            (self._directory / _name(old)).unlink(missing_ok=True)

    def _write(self, epoch: int, flags: int) -> None:
        self._beat += 1
        began = self._monotonic()
        descriptor = os.open(
            self._directory / _name(epoch), os.O_WRONLY | os.O_CLOEXEC | flags, 0o600
        )
        try:
            content = json.dumps({"holder": str(self._owner), "beat": self._beat})
            os.write(descriptor, content.ljust(_CONTENT_BYTES).encode())
        finally:
            os.close(descriptor)
        self._beaten_at = began

    def _read(self, epoch: int) -> str:
        try:
            return (self._directory / _name(epoch)).read_text()
        except (FileNotFoundError, ValueError):
            return ""

    def _epochs(self) -> list[int]:
        names = names_in(self._directory)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _name(epoch: int) -> str:
    return f"{epoch:08d}"
