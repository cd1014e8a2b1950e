"""Puts a working tier together from settings, trying everything for real, and says what it chose.

Owns the order of things at start: directories and I/O queue, or bucket and credentials; staging
memory, store, guard. Used by the connector and by `hicache-nixl probe`.
"""

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver
from hicache_nixl.errors import TransferError
from hicache_nixl.file_systems import make_directories
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.guard import Guard
from hicache_nixl.io_choice import IoChoice, choose_io, without_uring
from hicache_nixl.memory import HostBuffer, allocate
from hicache_nixl.mover import RecordMover
from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.registrations import Registration
from hicache_nixl.settings import Retries, Settings, fail_fast
from hicache_nixl.staging import StagingArena
from hicache_nixl.stores.base import Store
from hicache_nixl.stores.files import FilesStore
from hicache_nixl.stores.files_layout import FilesRoot
from hicache_nixl.stores.slab import SlabStore
from hicache_nixl.stores.slab_root import SlabRoot
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)

Engine = TransferEngine | ObjectEngine
AnyEngine = TypeVar("AnyEngine", TransferEngine, ObjectEngine)


@dataclass(frozen=True)
class BucketFindings:
    """A bucket, and what was found of it at start."""

    bucket: Bucket
    plugin: str
    verdict: str
    requests: str
    retries: Retries
    resolver: CredentialResolver


@dataclass
class Tier:
    """Everything that a connector needs, ready for use. `close` releases it."""

    settings: Settings
    choice: IoChoice
    reader: Engine
    writer: Engine
    staging: StagingArena
    store: Store
    guard: Guard
    mover: RecordMover
    buffer: HostBuffer
    bucket: BucketFindings | None = None
    """None for a store in directories."""
    _registrations: list[tuple[Engine, Registration]] = field(default_factory=list)

    def register_pool(self, geometry: PoolGeometry) -> None:
        """Let transfers touch a host pool in place, if its pages can move that way."""
        if not self.mover.placement(geometry).in_place:
            return
        for region in geometry.regions:
            for engine in (self.reader, self.writer):
                registration = engine.register_memory(region.address, region.nbytes)
                self._registrations.append((engine, registration))

    def close(self) -> None:
        """Wait a little for late transfers, then release everything. Idempotent.

        Staging memory that they may still touch is kept until they have ended.
        """
        self.guard.close()
        ended = all([self.reader.drain(), self.writer.drain()])
        self.store.close()
        while self._registrations:
            engine, registration = self._registrations.pop()
            engine.deregister(registration)
        self.reader.close()
        self.writer.close()
        if not ended:
            logger.warning("transfers are still in flight; their staging memory is kept")
            _kept.append((self.buffer, (self.reader, self.writer)))
        _release_kept()
        if ended:
            self.buffer.release()


_kept: list[tuple[HostBuffer, tuple[Engine, Engine]]] = []
"""Staging memory of closed tiers with late transfers: its mapping goes with the last reference."""


def _release_kept() -> None:
    for kept in list(_kept):
        buffer, engines = kept
        if not any(engine.late_transfers for engine in engines):
            _kept.remove(kept)
            buffer.release()


def assemble(settings: Settings) -> Tier:
    """Build a tier. Raises SettingsError, StoreError, TransferError or HostMemoryError, with
    everything released again."""
    bucket = settings.bucket
    with contextlib.ExitStack() as undo:
        if bucket is None:
            tier = _in_directories(settings, undo)
        else:
            tier = _in_bucket(settings, bucket, undo)
        undo.pop_all()
    return tier


def _in_directories(settings: Settings, undo: contextlib.ExitStack) -> Tier:
    directories = [Path(url.path) for url in settings.store]
    is_shared = settings.store[0].scheme == "files"
    make_directories(settings.in_tree_directories)
    # The store does this again, but a directory of something else must not be written to before.
    if is_shared:
        FilesRoot(directories[0]).prepare()
    else:
        SlabRoot(directories).prepare()
    choice = choose_io(settings, directories)
    buffer = _staging_memory(settings, undo)
    try:
        reader, writer = _pair(choice, undo)
    except TransferError as error:
        choice = without_uring(choice, settings, error)
        reader, writer = _pair(choice, undo)
    for note in choice.notes:
        logger.warning("%s", note)
    store: Store
    if is_shared:
        store = FilesStore(
            directories[0],
            capacity_bytes=settings.capacity,
            reader=reader,
            writer=writer,
            direct_io=choice.direct_io,
            timeout_s=settings.deadline,
        )
    else:
        store = SlabStore(
            directories,
            capacity_bytes=settings.capacity,
            segment_bytes=settings.segment,
            engines=(reader, writer),
            direct_io=choice.direct_io,
            busy_timeout_s=settings.deadline,
        )
    undo.callback(store.close)
    return _tier(settings, choice, reader, writer, buffer, store)


def _pair(choice: IoChoice, undo: contextlib.ExitStack) -> tuple[TransferEngine, TransferEngine]:
    """One engine to read and one to write, or none and a TransferError."""
    with contextlib.ExitStack() as both:
        pair = (
            _entered(both, TransferEngine(choice.plugin, choice.parameters)),
            _entered(both, TransferEngine(choice.plugin, choice.parameters)),
        )
        undo.push(both.pop_all())
    return pair


def _in_bucket(settings: Settings, bucket: Bucket, undo: contextlib.ExitStack) -> Tier:
    # Only here, because a store in directories needs none of the libraries behind them.
    from hicache_nixl.stores.objects import ObjectsStore
    from hicache_nixl.stores.objects_engines import plan_engines

    retries = fail_fast()
    resolver = CredentialResolver.of(bucket)
    plan = plan_engines(bucket, resolver, timeout_s=settings.deadline)
    buffer = _staging_memory(settings, undo)
    reader = _entered(undo, ObjectEngine(plan.plugin, plan.parameters))
    writer = _entered(undo, ObjectEngine(plan.plugin, plan.parameters))
    store = ObjectsStore(
        bucket,
        reader=reader,
        writer=writer,
        timeout_s=settings.deadline,
        resolver=resolver,
        plan=plan,
    )
    undo.callback(store.close)
    verdict = store.prepare(create_bucket=settings.create_bucket)
    found = BucketFindings(bucket, plan.plugin, verdict, plan.note, retries, resolver)
    choice = IoChoice(plan.plugin, None, {}, direct_io=False)
    return _tier(settings, choice, reader, writer, buffer, store, found)


def _staging_memory(settings: Settings, undo: contextlib.ExitStack) -> HostBuffer:
    buffer = allocate(
        settings.staging, hugepages=settings.hugepages, hugepage_size=settings.hugepage_size
    )
    undo.callback(buffer.release)
    return buffer


def _entered(undo: contextlib.ExitStack, engine: AnyEngine) -> AnyEngine:
    undo.callback(engine.close)
    return engine


def _tier(
    settings: Settings,
    choice: IoChoice,
    reader: Engine,
    writer: Engine,
    buffer: HostBuffer,
    store: Store,
    found: BucketFindings | None = None,
) -> Tier:
    staging = StagingArena(buffer)
    registrations = [
        (engine, engine.register_memory(buffer.address, staging.nbytes))
        for engine in (reader, writer)
    ]
    mover = RecordMover(
        reader=reader,
        writer=writer,
        staging=staging,
        direct_io=choice.direct_io,
        checks_payload=settings.verify == "full",
    )
    guard = Guard(store, deadline_s=settings.deadline)
    return Tier(
        settings,
        choice,
        reader,
        writer,
        staging,
        store,
        guard,
        mover,
        buffer,
        found,
        registrations,
    )
