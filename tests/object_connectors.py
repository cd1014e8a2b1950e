"""Connectors whose store is a bucket, for tests."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import storage_load
from connectors import config
from hicache_nixl import HiCacheNixlConnector
from s3_access import ADMIN, Identity


def bucket_config(store: str, identity: Identity | None = ADMIN, **changes: Any) -> Any:
    """What SGLang passes, with the store in a bucket; inline keys unless `identity` is None."""
    keys = {}
    if identity is not None:
        keys = {"access_key": identity.access_key, "secret_key": identity.secret_key}
    whole = config(Path("/unused"), store=store, **keys, **changes)
    del whole.extra_config["capacity"]
    return whole


@contextlib.contextmanager
def connected(
    store: str, identity: Identity | None = ADMIN, *, deadline_s: float = 1.0, **changes: Any
) -> Iterator[storage_load.Load]:
    """A connector on a bucket with a pool registered, and a load for it; closed at the end."""
    pool = storage_load.make_pool()
    given = bucket_config(store, identity, deadline=deadline_s, **changes)
    connector = HiCacheNixlConnector(given, {})
    try:
        connector.register_mem_pool_host(pool)
        connector.on_host_pools_registered()
        yield storage_load.Load(connector, pool, deadline_s=deadline_s)
    finally:
        connector.close()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
