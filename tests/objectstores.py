"""Objects stores for tests, on a real S3 server, with or without NIXL.

Keys, pages and users are those of `slabs`.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver
from hicache_nixl.memory import allocate
from hicache_nixl.mover import RecordMover
from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.staging import StagingArena
from hicache_nixl.stores.objects import ObjectsStore
from hicache_nixl.stores.objects_engines import plan_engines
from slabs import KIB, MIB, Tenant, namespace
from support import host_pool

os.environ.setdefault("AWS_RETRY_MODE", "standard")  # before the first agent of the process
os.environ.setdefault("AWS_MAX_ATTEMPTS", "1")


@contextmanager
def open_store(bucket: Bucket, *, timeout_s: float = 10.0) -> Iterator[ObjectsStore]:
    """A store without NIXL, as the command line uses it."""
    store = ObjectsStore(bucket, timeout_s=timeout_s)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def open_objects_tenant(
    bucket: Bucket,
    *,
    payload: int = 4 * KIB,
    segments: int = 1,
    pages: int = 128,
    model: str = "model",
    checks_payload: bool = True,
    timeout_s: float = 10.0,
    staging: int = 8 * MIB,
    resolver: CredentialResolver | None = None,
    seed: int = 1,
) -> Iterator[Tenant]:
    """A store with engines and a user of it, closed at the end."""
    resolver = resolver or CredentialResolver.of(bucket)
    plan = plan_engines(bucket, resolver, timeout_s=timeout_s)
    with ExitStack() as cleanup:
        reader, writer = (ObjectEngine(plan.plugin, plan.parameters) for _ in range(2))
        cleanup.callback(writer.close)
        cleanup.callback(reader.close)
        buffer = allocate(staging)
        arena = StagingArena(buffer)
        for engine in (reader, writer):
            cleanup.callback(
                engine.deregister, engine.register_memory(buffer.address, arena.nbytes)
            )
        store = ObjectsStore(
            bucket,
            reader=reader,
            writer=writer,
            timeout_s=timeout_s,
            resolver=resolver,
            plan=plan,
        )
        cleanup.callback(store.close)
        cleanup.callback(reader.drain)
        cleanup.callback(writer.drain)
        mover = RecordMover(
            reader=reader,
            writer=writer,
            staging=arena,
            direct_io=False,
            checks_payload=checks_payload,
        )
        pool = host_pool(seed, pages, segments, payload // segments)
        yield Tenant(store, mover, pool, namespace(payload, model))
