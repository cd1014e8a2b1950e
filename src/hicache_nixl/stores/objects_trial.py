"""Tries whether a bucket works, by small objects that go the way pages go, and says what does not.

Owns the store's marker, by which a store of a later version is known, and the probe object.
"""

import contextlib
import secrets
from collections.abc import Callable
from typing import TypeVar

from hicache_nixl.errors import DeadlineExceededError, StoreError, TransferError
from hicache_nixl.stores.objects_client import ObjectClient
from hicache_nixl.stores.objects_errors import no_answer
from hicache_nixl.stores.objects_layout import Names, check_marker, marker_content
from hicache_nixl.stores.objects_probe import NBYTES, Prober

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

    def prepare(self, deadline: float) -> str:
        """Write, read and remove an object; what was found, in one line. Leaves the marker."""
        self.check_format(deadline)
        self._keep_marker(deadline)
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

    def explain_write(self, deadline: float) -> None:
        """No page was written through NIXL: raises, with the reason if one shows beside it."""
        self._client.write(self._probe, bytes(NBYTES), deadline=deadline)
        self._remove_probe(deadline)
        raise StoreError(
            f"{self._bucket}: no page could be written through NIXL, though a small object can be "
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
            self._keep_marker(deadline)
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

    def _keep_marker(self, deadline: float) -> None:
        """Write the store's marker if it is not there (any more)."""
        if self._client.read(self._names.marker, deadline=deadline) is None:
            self._client.write(self._names.marker, marker_content(), deadline=deadline)

    def _remove_probe(self, deadline: float) -> None:
        with contextlib.suppress(StoreError):
            self._client.delete([self._probe], deadline=deadline)
