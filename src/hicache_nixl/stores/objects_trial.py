"""Tries whether a bucket works, by small objects that go the way pages go, and says what does not.

Owns the store's notes, which are its marker, by which a store of a later version is known, and the
manifests of namespaces; and the probe object.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from hicache_nixl.daemons import start_daemon
from hicache_nixl.errors import DeadlineExceededError, StoreError, TransferError
from hicache_nixl.stores.objects_client import ObjectClient
from hicache_nixl.stores.objects_errors import no_answer
from hicache_nixl.stores.objects_layout import Names, check_marker, marker_content
from hicache_nixl.stores.objects_probe import NBYTES, Prober

_LOOK_EVERY_S = 60.0
_LOOK_S = 10.0

Result = TypeVar("Result")


class Trial:
    """Safe for threads. All raise StoreError, and block until `deadline` at most.

    Args:
        client, names: of the store's bucket.
        prober: moves small objects through NIXL; None where no NIXL is used.
        probe: name of an object that is this store's alone.
    """

    def __init__(
        self, client: ObjectClient, names: Names, prober: Prober | None, probe: str
    ) -> None:
        self._client = client
        self._bucket = client.bucket
        self._names = names
        self._prober = prober
        self._probe = probe
        self._format_checked = False
        self._notes = {names.marker: marker_content()}
        self._looked_at = time.monotonic()

    def prepare(self, deadline: float) -> str:
        """Write, read and remove an object; what was found, in one line. Leaves the notes."""
        self.check_format(deadline)
        self._keep_notes(deadline)
        content = secrets.token_bytes(NBYTES)
        try:
            self._write(content, deadline)
            if self._read(self._probe, deadline) != content:
                raise StoreError(
                    f"{self._bucket}: what was read is not what was written; see what lies between"
                )
        except BaseException:
            self._remove_probe(deadline)
            raise
        self._client.delete([self._probe], deadline=deadline)
        way = "through NIXL" if self._prober else "without NIXL"
        return f"an object was written, read and removed {way}, with {self._bucket.credentials}"

    def read(self, deadline: float) -> None:
        """Read the marker."""
        self._read(self._names.marker, deadline)

    def write(self, deadline: float) -> None:
        """Write an object, and remove it if that is allowed."""
        self._write(bytes(NBYTES), deadline)
        self._remove_probe(deadline)

    def check_format(self, deadline: float) -> bool:
        """Whether a store is there. StoreFormatError for one of a later version, StoreError if
        something else is."""
        if not self._format_checked:
            content = self._client.read(self._names.marker, deadline=deadline)
            if content is None:
                return False
            check_marker(content, self._bucket)
            self._format_checked = True
        return True

    def note(self, name: str, content: bytes, deadline: float) -> None:
        """Write a note if it is not there, now and whenever it is found missing."""
        self._notes[name] = content
        self._keep({name: content}, deadline)

    def look_at_notes(self) -> None:
        """See behind the call, once a minute, whether the notes are still there: whoever empties
        the bucket, or makes it again, takes them away, and pages without them are seen by nobody
        but their owner."""
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()

        def look() -> None:
            with contextlib.suppress(StoreError):  # calls tell of trouble with the bucket
                self._keep_notes(time.monotonic() + _LOOK_S)

        start_daemon(look, "hicache-nixl-notes")

    def explain_write(self, deadline: float, *, nbytes: int = NBYTES) -> None:
        """No page, of `nbytes` bytes, was written through NIXL: raises, with the reason if one
        shows beside it."""
        self._client.write(self._probe, bytes(NBYTES), deadline=deadline)
        try:
            if nbytes > NBYTES:
                self._client.write(self._probe, bytes(nbytes), deadline=deadline)
        except StoreError as error:
            raise StoreError(
                f"{error}; an object of {nbytes} bytes is not taken, one of {NBYTES} is: see what "
                "size server, or proxies before it, allow"
            ) from None
        finally:
            self._remove_probe(deadline)
        raise StoreError(
            f"{self._bucket}: no page could be written through NIXL, though as much can be "
            "written beside it; see NIXL's log"
        )

    def close(self) -> None:
        """End registrations. Idempotent."""
        if self._prober is not None:
            self._prober.close()

    def _write(self, content: bytes, deadline: float) -> None:
        def write() -> None:
            self._client.write(self._probe, content, deadline=deadline)

        prober = self._prober
        if prober is None:
            write()
            return
        self._through_nixl(
            "write", lambda: prober.write(self._probe, content, deadline=deadline), write
        )

    def _read(self, name: str, deadline: float) -> bytes:
        def read() -> bytes:
            self._keep_notes(deadline)
            return self._client.read(name, deadline=deadline) or b""

        prober = self._prober
        if prober is None:
            return read()
        return self._through_nixl("read", lambda: prober.read(name, deadline=deadline), read)

    def _through_nixl(
        self, what: str, move: Callable[[], Result], beside: Callable[[], object]
    ) -> Result:
        """`move`, and once more if it failed and the same works `beside` NIXL: by that, credentials
        that changed are noticed. Otherwise what fails there says why."""
        try:
            return move()
        except DeadlineExceededError:
            raise no_answer(self._bucket, what) from None
        except TransferError:
            beside()
        try:
            return move()
        except TransferError as error:
            raise StoreError(
                f"{self._bucket} cannot {what} through NIXL, only beside it: {error}; see NIXL's "
                "log"
            ) from error

    def _keep_notes(self, deadline: float) -> None:
        self._keep(dict(self._notes), deadline)

    def _keep(self, notes: dict[str, bytes], deadline: float) -> None:
        """Write those of the notes that are not there (any more)."""
        found = self._client.read_many(list(notes), deadline=deadline)
        for (name, content), stored in zip(notes.items(), found, strict=True):
            if stored is None:
                self._client.write(name, content, deadline=deadline)

    def _remove_probe(self, deadline: float) -> None:
        with contextlib.suppress(StoreError):
            self._client.delete([self._probe], deadline=deadline)
