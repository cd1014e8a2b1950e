"""The client of a bucket: looking, listing, small objects, deleting. Pages move through NIXL.

Requests run on an event loop of the client's own, so that many are in flight at once and one that
hangs ends with its caller's deadline. Must not know what the objects are.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver, Credentials
from hicache_nixl.errors import StoreError
from hicache_nixl.stores.objects_errors import RefusedError, error_of, no_answer, says_no_bucket
from hicache_nixl.stores.objects_remote import make_store, obstore_error

logger = logging.getLogger(__name__)

IN_FLIGHT = 64
"""With a round trip of 10 ms 512 objects take 80 ms; more cost more CPU than they gain."""
LISTED_AT_ONCE = 1000
BUCKET_AGE_S = 3.0
_REFRESH_EVERY_S = 2.0
_LOOK_EVERY_S = 10.0
_CLOSE_WAIT_S = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Listed:
    """An object as a listing shows it."""

    name: str
    nbytes: int
    modified_ns: int


class ObjectClient:
    """Requests to one bucket. Safe for threads, not for forks; every call blocks, until `deadline`
    (`time.monotonic`) at most.

    All raise StoreError, in one line, where the bucket is not there, refuses, or does not answer.
    On a refusal the credentials are resolved again, and if they changed the request is repeated.

    Args:
        bucket: whose objects.
        resolver: of its credentials.
        timeout_s: how long one request may take, whatever the deadline.
        marker: name of an object that tells, when asked for, a missing bucket from a missing
            object.
        credentials: what `resolver` said last; it is asked if None.
        on_change: called with credentials that are not those before, on any thread.
    """

    def __init__(
        self,
        bucket: Bucket,
        resolver: CredentialResolver,
        *,
        timeout_s: float,
        marker: str,
        credentials: Credentials | None = None,
        on_change: Callable[[Credentials], object] = lambda _: None,
    ) -> None:
        self.bucket = bucket
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._marker = marker
        self._on_change = on_change
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._credentials = credentials
        self._seen_at = self._refreshed_at = self._looked_at = float("-inf")
        self._closed = False

    # -- requests ---------------------------------------------------------------------------------

    def sizes(
        self, names: Sequence[str], *, deadline: float, bucket_age_s: float = BUCKET_AGE_S
    ) -> list[int | None]:
        """Bytes of each object, None where there is none; a request each, many at once.

        A missing bucket looks like missing objects: where it was not seen to be there in the last
        `bucket_age_s` seconds, it is looked for beside them, by one more request.
        """

        async def look(store: Any) -> list[int | None]:
            import obstore

            slots = asyncio.Semaphore(IN_FLIGHT)

            async def one(name: str) -> int | None:
                async with slots:
                    try:
                        return int((await obstore.head_async(store, name))["size"])
                    except FileNotFoundError:
                        return None

            async def see_bucket() -> None:
                if time.monotonic() - self._seen_at > bucket_age_s:
                    await _content(store, self._marker)
                    self.saw_bucket()

            return (await _together([*(one(name) for name in names), see_bucket()]))[:-1]

        found = self._run(look, "read", deadline)
        if any(size is not None for size in found):
            self.saw_bucket()
        return found

    def read(self, name: str, *, deadline: float) -> bytes | None:
        """The content of an object, None if it is not there. A missing bucket is StoreError."""

        async def get(store: Any) -> bytes | None:
            return await _content(store, name)

        return self._run(get, "read", deadline)

    def read_many(self, names: Sequence[str], *, deadline: float) -> list[bytes | None]:
        """As `read`, of several objects at once."""

        async def get(store: Any) -> list[bytes | None]:
            return await _together([_content(store, name) for name in names])

        return self._run(get, "read", deadline)

    def write(self, name: str, content: bytes, *, deadline: float) -> None:
        """Make or replace an object."""

        async def put(store: Any) -> None:
            import obstore

            await obstore.put_async(store, name, content, use_multipart=False)

        self._run(put, "write", deadline)

    def delete(self, names: Sequence[str], *, deadline: float) -> None:
        """Remove objects; those that are not there do not matter. One request per 1000."""

        async def remove(store: Any) -> None:
            import obstore

            try:
                await obstore.delete_async(store, list(names))
            except FileNotFoundError as error:
                if says_no_bucket(error):
                    raise

        if names:
            self._run(remove, "delete", deadline)

    def listed(self, prefix: str, *, deadline: float) -> Iterator[list[Listed]]:
        """The objects whose names begin with `prefix`, which ends with "/", 1000 at a time."""
        stream: Any = None
        while True:

            async def page(store: Any) -> list[Any] | None:
                import obstore

                nonlocal stream
                if stream is None:
                    stream = obstore.list(store, prefix, chunk_size=LISTED_AT_ONCE)
                return await anext(stream, None)

            chunk = self._run(page, "list", deadline)
            if chunk is None:
                return
            yield [
                Listed(each["path"], each["size"], int(each["last_modified"].timestamp() * 1e9))
                for each in chunk
            ]

    def saw_bucket(self) -> None:
        """The bucket is there: somebody has just read or written an object."""
        self._seen_at = time.monotonic()

    # -- credentials ------------------------------------------------------------------------------

    @property
    def credentials(self) -> Credentials:
        """What requests are signed with. May block; StoreError where there are none."""
        with self._lock:
            return self._known()[0]

    def refresh(self) -> bool:
        """Resolve the credentials again, if that was not done just now; whether they changed."""
        with self._lock:
            if time.monotonic() - self._refreshed_at < _REFRESH_EVERY_S:
                return False
            self._refreshed_at = time.monotonic()
            self._resolver.refresh()
        return self._adopt()

    def _adopt(self) -> bool:
        """Use the resolver's credentials; whether they are others."""
        credentials = self._resolver.current()
        with self._lock:
            before = self._credentials
            if credentials == before:
                return False
            self._store = make_store(self.bucket, credentials, timeout_s=self._timeout_s)
            self._credentials = credentials
        if before is not None:
            logger.info("%s: credentials from %s changed", self.bucket, self.bucket.credentials)
            self._on_change(credentials)
        return True

    def _known(self) -> tuple[Credentials, Any]:
        """Credentials and store; the lock is held."""
        if self._closed:
            raise StoreError(f"the store {self.bucket} is closed")
        if self._credentials is None:
            self._credentials = self._resolver.current()
        if self._store is None:
            self._store = make_store(self.bucket, self._credentials, timeout_s=self._timeout_s)
        return self._credentials, self._store

    def _look_for_others(self) -> None:
        """See behind the call whether the credentials have changed, once in a while."""
        now = time.monotonic()
        if self._resolver.is_fixed or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now

        def look() -> None:
            try:
                self._adopt()
            except StoreError as error:
                logger.warning("%s", error)

        threading.Thread(target=look, name="hicache-nixl-credentials", daemon=True).start()

    # -- the loop ---------------------------------------------------------------------------------

    def _run(
        self, request: Callable[[Any], Coroutine[Any, Any, Result]], what: str, deadline: float
    ) -> Result:
        self._look_for_others()
        try:
            result = self._once(request, what, deadline)
        except RefusedError:
            if not self.refresh():
                raise
            result = self._once(request, what, deadline)
        return result

    def _once(
        self, request: Callable[[Any], Coroutine[Any, Any, Result]], what: str, deadline: float
    ) -> Result:
        with self._lock:
            _, store = self._known()
            loop = self._started_loop()
        left = min(deadline - time.monotonic(), self._timeout_s)
        if left <= 0:
            raise no_answer(self.bucket, what)

        async def limited() -> Result:
            return await asyncio.wait_for(request(store), left)

        try:
            return asyncio.run_coroutine_threadsafe(limited(), loop).result()
        except TimeoutError:
            raise no_answer(self.bucket, what) from None
        except concurrent.futures.CancelledError:
            raise StoreError(f"the store {self.bucket} is closed") from None
        except (OSError, ValueError, obstore_error()) as error:
            raise error_of(error, self.bucket, what) from None

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="hicache-nixl-objects", daemon=True
            )
            self._thread.start()
        return self._loop

    def close(self) -> None:
        """End what is in flight, with StoreError for who waits. Idempotent."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
            thread, self._store = self._thread, None
        if loop is None or thread is None:
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(_CLOSE_WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_WAIT_S)
        if not thread.is_alive():
            loop.close()


async def _together(requests: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All of them at once; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _content(store: Any, name: str) -> bytes | None:
    """None where the object is missing; where the bucket is, the error."""
    import obstore

    try:
        return bytes(await (await obstore.get_async(store, name)).bytes_async())
    except FileNotFoundError as error:
        if says_no_bucket(error):
            raise
        return None
