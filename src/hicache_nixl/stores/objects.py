"""The objects store: one object a page record, in a bucket that any number of hosts may share.

    put   look for the first -> write records that are missing (mover)
    get   read and check records (mover)

There is no index: what the bucket says is true. An object is whole or absent, and one that is not
what it should be fails its size, trailer or checksum: it counts as missing for a while, so that the
next put writes over it. It is not removed: what garbles an answer on the way would cost good pages.
Pages move through NIXL; everything else is
asked of the bucket by `objects_client.py`. How much a bucket holds is the business of its expiry
rule (`objects_admin.py`), which counts from when a page was written.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hicache_nixl import record
from hicache_nixl.batch import Batch, ObjectNames, Outcome, Outcomes, WriteStamp, firsts
from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver, Credentials
from hicache_nixl.errors import StagingShortageError, StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.mover import RecordMover
from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.pace import Pace
from hicache_nixl.stores import objects_admin
from hicache_nixl.stores.base import CheckedPage, Direction, Flags, NamespaceUse, StoreUse, not_open
from hicache_nixl.stores.objects_client import BUCKET_AGE_S, ObjectClient
from hicache_nixl.stores.objects_engines import EnginePlan
from hicache_nixl.stores.objects_errors import NoAnswerError, NoBucketError, RefusedError
from hicache_nixl.stores.objects_layout import Names, manifest_content
from hicache_nixl.stores.objects_pages import PageObjects
from hicache_nixl.stores.objects_probe import Prober
from hicache_nixl.stores.objects_search import Seen, leading_run
from hicache_nixl.stores.objects_trial import Trial

logger = logging.getLogger(__name__)

_SEEN_S = 10.0
_DAMAGED_S = 60.0
_MOST_SEEN = 65536
_EXPLAINING_READS = 3

_Rows = npt.NDArray[np.int64]


class ObjectsStore:
    """Implements `stores.base.Store` on a bucket. Safe for threads, not for forks. Does no I/O
    until it is asked to; `prepare` tries the bucket for real.

    Args:
        bucket: where the objects lie.
        reader, writer: the engines that will be moving records (None where no NIXL is used).
        timeout_s: how long calls without a deadline of their own, and any one request beside
            NIXL's, may take.
        resolver: of the bucket's credentials; its own if None.
        plan: what the engines were built with; they get its parameters anew when credentials
            change. Needed with engines.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        reader: ObjectEngine | None = None,
        writer: ObjectEngine | None = None,
        timeout_s: float = 10.0,
        resolver: CredentialResolver | None = None,
        plan: EnginePlan | None = None,
    ) -> None:
        self.bucket = bucket
        self._engines = [engine for engine in (reader, writer) if engine is not None]
        self._plan = plan
        self._timeout_s = timeout_s
        self._resolver = CredentialResolver.of(bucket) if resolver is None else resolver
        self._names = Names(bucket)
        self._client = ObjectClient(
            bucket,
            self._resolver,
            timeout_s=timeout_s,
            marker=self._names.marker,
            credentials=None if plan is None else plan.credentials,
            on_change=self._credentials_changed,
        )
        self._pages = PageObjects(self._client, self._names)
        self._writer_name = secrets.token_bytes(16)
        self._trial = Trial(
            self._client,
            self._names,
            Prober(reader, writer) if reader and writer else None,
            self._names.probe(self._writer_name),
        )
        self._spaces: dict[bytes, Namespace] = {}
        self._seen = Seen(life_s=_SEEN_S, limit=_MOST_SEEN)
        self._damaged = Seen(life_s=_DAMAGED_S, limit=_MOST_SEEN)
        self._pace = Pace()

    # -- start and health -------------------------------------------------------------------------

    def prepare(self, *, create_bucket: bool = False) -> str:
        """Write, read and remove a small object, as pages are; what was found, in one line.

        Makes the bucket if it is missing and `create_bucket`. Raises StoreError, one line with the
        fix, and StoreFormatError for a store of a later version, which is left untouched.
        """
        deadline = time.monotonic() + self._timeout_s
        created = create_bucket and objects_admin.create_bucket(self.bucket, self._resolver)
        found = self._trial.prepare(deadline)
        return f"{self.bucket}: {'made; ' if created else ''}{found}"

    def is_made(self) -> bool:
        """Whether a store was made here; one request. Raises as `prepare`."""
        return self._trial.check_format(time.monotonic() + self._timeout_s)

    def check(self, direction: Direction, *, deadline: float) -> None:
        """Try whether reading or writing works; see `Store`."""
        if direction == "read":
            self._trial.read(deadline)
        else:
            self._trial.write(deadline)

    def _credentials_changed(self, credentials: Credentials) -> None:
        if self._plan is not None:
            parameters = self._plan.parameters_for(credentials)
            for engine in self._engines:
                engine.replace(parameters)

    # -- namespaces -------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace usable; see `Store`."""
        if namespace.digest in self._spaces:
            return
        deadline = time.monotonic() + self._timeout_s
        self._trial.check_format(deadline)
        name = self._names.manifest(namespace.digest)
        self._trial.note(name, manifest_content(namespace), deadline)
        self._spaces[namespace.digest] = namespace

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace. Lists every page."""
        self._trial.check_format(time.monotonic() + self._timeout_s)
        return [
            self._pages.use(namespace, deadline=math.inf)
            for namespace in self._pages.noted_namespaces(deadline=math.inf)
        ]

    def clear(self, namespace: bytes, *, deadline: float = math.inf) -> int:
        """Forget every page of one namespace; see `Store`.

        Pages that other calls, of any host, are just writing may be there afterwards.
        """
        self._trial.check_format(min(deadline, time.monotonic() + self._timeout_s))
        try:
            return self._pages.clear(namespace, deadline=deadline)
        finally:
            self._seen.forget(namespace)
            self._damaged.forget(namespace)

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page; damaged ones are removed."""
        self._trial.check_format(time.monotonic() + self._timeout_s)
        for noted in self._pages.noted_namespaces(deadline=math.inf):
            if namespace in (None, noted.digest):
                yield from self._pages.verify(noted, deadline=math.inf)

    def use(self) -> StoreUse:
        """Nothing is known: the bucket has no budget, and counting means listing all of it."""
        return StoreUse(None, None, None, None)

    # -- pages ------------------------------------------------------------------------------------

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is stored, by search: a hole in it may go
        unnoticed, and a read then stops there. Each page seen has its exact size."""
        space = self._space(namespace)
        deadline = time.monotonic() + self._timeout_s
        seen = self._seen.which(namespace, keys)
        known = len(keys) if seen.all() else int(seen.argmin())

        def probe(positions: list[int]) -> Sequence[bool]:
            there: list[bool] = self._look(space, [keys[i] for i in positions], deadline).tolist()
            return there

        return leading_run(len(keys), probe, start=known)

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> Flags:
        """Which of `keys` are stored; see `Store`. A request each, for those not seen lately."""
        space = self._space(namespace)
        there = self._seen.which(namespace, keys)
        rows = np.flatnonzero(~there)
        if len(rows):
            deadline = time.monotonic() + self._timeout_s
            there[rows] = self._look(space, [keys[i] for i in rows], deadline)
        return there

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Store pages; see `Store`. A set of pages is there or not, most often: only if the first
        one is, the others are looked for. What cannot be told to be there is written."""
        space = self._space(batch.namespace)
        self._trial.look_at_notes()
        first_rows = firsts(batch.keys)
        rows = np.unique(first_rows)
        stored = np.zeros(len(batch.keys), np.bool_)
        keys = [batch.keys[i] for i in rows]
        for some in (slice(0, 1), slice(1, None)):
            stored[rows[some]] = self._look_before_put(space, keys[some], deadline)
            if not stored[rows].any():
                break
        wanted = rows[~stored[rows]]
        if len(wanted):
            stored[wanted] = self._write(
                space, mover, batch.take(wanted), len(prefix) + wanted, deadline
            )
        return stored[first_rows]

    def get(
        self,
        mover: RecordMover,
        batch: Batch,
        prefix: Sequence[bytes],  # noqa: ARG002 - uses are not kept
        *,
        deadline: float,
    ) -> Flags:
        """Read pages into their host pages; see `Store`."""
        space = self._space(batch.namespace)
        outcomes = mover.read(
            batch, self._where(batch), None, deadline=deadline, on_late=_nothing_to_keep
        )
        good: Flags = outcomes == Outcome.GOOD
        read = [batch.keys[i] for i in np.flatnonzero(good)]
        self._seen.add(space.digest, read)
        self._damaged.forget(space.digest, read)
        self._seen.forget(space.digest, [batch.keys[i] for i in np.flatnonzero(~good)])
        damaged = [batch.keys[i] for i in np.flatnonzero(outcomes == Outcome.FOREIGN)]
        if good.any() or damaged:
            self._client.saw_bucket()
        elif not batch.loan.is_over and len(good):
            _refuse_untried(mover, outcomes)
            self._explain_read(space, mover, batch, deadline)
        if damaged:
            self._damaged.add(space.digest, damaged)
            if self._pace.allows():
                logger.warning(
                    "%s: %d pages are not what was written; they count as missing until they are "
                    "written again, or %d s",
                    self.bucket,
                    len(damaged),
                    _DAMAGED_S,
                )
        return good

    def close(self) -> None:
        """End requests in flight and registrations. Idempotent."""
        self._trial.close()
        self._client.close()

    # -- parts of it ------------------------------------------------------------------------------

    def _space(self, namespace: bytes) -> Namespace:
        try:
            return self._spaces[namespace]
        except KeyError:
            raise not_open(namespace) from None

    def _where(self, batch: Batch) -> ObjectNames:
        return ObjectNames([self._names.page(batch.namespace, key) for key in batch.keys])

    def _look(
        self,
        space: Namespace,
        keys: Sequence[bytes],
        deadline: float,
        *,
        bucket_age_s: float = BUCKET_AGE_S,
    ) -> Flags:
        """Which of the pages are there, with their exact size."""
        names = [self._names.page(space.digest, key) for key in keys]
        size = record.record_bytes(space.payload_bytes)
        sizes = self._client.sizes(names, deadline=deadline, bucket_age_s=bucket_age_s)
        there = np.array([found == size for found in sizes], np.bool_)
        there &= ~self._damaged.which(space.digest, keys)
        self._seen.add(space.digest, [keys[i] for i in np.flatnonzero(there)])
        return there

    def _look_before_put(self, space: Namespace, keys: Sequence[bytes], deadline: float) -> Flags:
        """As `_look`, in half of the time left at most; none if all requests failed by themselves,
        for writing may work."""
        now = time.monotonic()
        try:
            return self._look(space, keys, now + (deadline - now) / 2, bucket_age_s=math.inf)
        except (RefusedError, NoBucketError, NoAnswerError):
            raise
        except StoreError:
            return np.zeros(len(keys), np.bool_)

    def _write(
        self, space: Namespace, mover: RecordMover, batch: Batch, depths: _Rows, deadline: float
    ) -> Flags:
        outcomes: Outcomes = mover.write(
            batch,
            self._where(batch),
            WriteStamp(time.time_ns(), self._writer_name, depths),
            deadline=deadline,
            on_late=_nothing_to_keep,
        )
        good: Flags = outcomes == Outcome.GOOD
        written = [batch.keys[i] for i in np.flatnonzero(good)]
        self._damaged.forget(space.digest, written)
        self._seen.add(space.digest, written)
        if good.any():
            self._client.saw_bucket()
        elif not batch.loan.is_over:
            _refuse_untried(mover, outcomes)
            self._trial.explain_write(deadline, nbytes=record.record_bytes(space.payload_bytes))
        return good

    def _explain_read(
        self, space: Namespace, mover: RecordMover, batch: Batch, deadline: float
    ) -> None:
        """Nothing came: raises StoreError, unless the first page is missing or has another size."""
        first = batch.take(np.zeros(1, np.int64))
        where = self._where(first)
        # It may have been written since, and again after somebody cleared it meanwhile.
        for _ in range(_EXPLAINING_READS):
            size = self._client.sizes(where.names, deadline=deadline, bucket_age_s=0.0)[0]
            if size != record.record_bytes(space.payload_bytes):
                return
            again = mover.read(first, where, None, deadline=deadline, on_late=_nothing_to_keep)
            if again[0] != Outcome.FAILED:
                return
        raise StoreError(
            f"{self.bucket}: no page could be read through NIXL, though the first is there; "
            "see NIXL's log"
        )


def _refuse_untried(mover: RecordMover, outcomes: Outcomes) -> None:
    """Raises StagingShortageError if not one page was tried."""
    if (outcomes == Outcome.UNTRIED).all():
        raise StagingShortageError(
            f"no staging came free: late transfers hold {mover.staging.quarantined_bytes} of "
            f"{mover.staging.nbytes} bytes until they end; raise staging"
        )


def _nothing_to_keep(_: _Rows) -> Callable[[], None]:
    """An object that is written late appears whole or not at all, and its name is not reused."""
    return lambda: None
