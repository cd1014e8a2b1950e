"""The host pools of one connector, by the names the engine gives them.

Owns: what a pool must pass to be registered, and what of a call concerns its pages. Every pool is a
geometry and a namespace; the one exception is the anchor of models that keep all bytes in other
pools. Must not know: SGLang, hit policies, deadlines.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache_nixl.batch import Batch
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import PoolGeometry, describe_pool
from hicache_nixl.guard import Guard
from hicache_nixl.host_pools import count, pool_kind
from hicache_nixl.identity import Namespace, key_bytes
from hicache_nixl.startup import Tier
from hicache_nixl.stores.base import Flags

Identify = Callable[[Any, PoolGeometry, str], Namespace]
"""From a host pool, its geometry and its name to its namespace; raises RegistrationError."""


@dataclass(frozen=True)
class PageBytes:
    """What the pages of a pool are, and how they move."""

    geometry: PoolGeometry
    namespace: Namespace
    in_place: bool


@dataclass(frozen=True)
class RegisteredPool:
    """A host pool under a name. `page_bytes` is None where it only counts pages."""

    name: str
    host_pool: Any
    page_tokens: int
    page_bytes: PageBytes | None

    def batch(self, keys: Sequence[str], host_indices: Any) -> Batch | None:
        """The pages that a call moves, None if there are no bytes to move.

        `host_indices`: token indices, `page_tokens` for each key. Raises RegistrationError for
        indices that do not fit the keys or the pool.
        """
        try:
            if self.page_bytes is not None:
                geometry, namespace = self.page_bytes.geometry, self.page_bytes.namespace
                numbers = geometry.page_numbers(host_indices, len(keys))
                names = [key_bytes(key) for key in keys]
                return Batch(geometry, numbers, names, namespace.digest) if keys else None
            if host_indices is None or len(host_indices) != len(keys) * self.page_tokens:
                found = "no" if host_indices is None else len(host_indices)
                raise RegistrationError(
                    f"{found} host indices for {len(keys)} keys: pass "
                    f"{len(keys) * self.page_tokens}, {self.page_tokens} tokens for each page"
                )
        except RegistrationError as error:
            raise RegistrationError(f"host pool {self.name!r}: {error}") from error
        return None

    def __str__(self) -> str:
        if self.page_bytes is None:
            return f"{self.name}: no bytes of its own, pages of {self.page_tokens} tokens"
        geometry = self.page_bytes.geometry
        way = "in place" if self.page_bytes.in_place else "through staging"
        return (
            f"{self.name}: {geometry.layout}, {geometry.pages} pages of {geometry.page_tokens} "
            f"tokens, {geometry.payload_bytes} bytes in {len(geometry.lengths)} segments, {way}; "
            f"namespace {self.page_bytes.namespace}"
        )


class PoolTable:
    """Registered pools. Safe for threads; a pool that was added stays.

    Args:
        tier: whose guard opens the namespaces, and whose engines get to know the memory.
        identify: gives each pool its namespace.
    """

    def __init__(self, tier: Tier, identify: Identify) -> None:
        self._tier = tier
        self._identify = identify
        self._pools: dict[str, RegisteredPool] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> RegisteredPool:
        """The pool of a name. Raises RegistrationError if there is none."""
        try:
            return self._pools[name]
        except KeyError:
            known = ", ".join(self._pools) or "none"
            raise RegistrationError(
                f"host pool {name!r} is not registered (registered: {known}); "
                "call register_mem_host_pool_v2 first"
            ) from None

    def all(self) -> list[RegisteredPool]:
        """Every pool, in the order of registration."""
        return list(self._pools.values())

    def add(self, host_pool: Any, name: str) -> tuple[RegisteredPool, bool]:
        """Register a host pool; the entry, and whether it is new. The same pool under the same name
        changes nothing.

        Raises RegistrationError for another pool under a name that is taken, for a pool that is not
        understood and for pages that the staging memory or the store cannot hold. The table is
        then as before.
        """
        with self._lock:
            known = self._pools.get(name)
            if known is None:
                entry = self._prepare(host_pool, name)
                self._pools[name] = entry
                return entry, True
        if known.host_pool is not host_pool:
            raise RegistrationError(
                f"another host pool {name!r} is registered already ({known}); one connector serves "
                "one pool of each name: make a new connector"
            )
        return known, False

    def _prepare(self, host_pool: Any, name: str) -> RegisteredPool:
        if pool_kind(host_pool) == "logical":
            return RegisteredPool(name, host_pool, count(host_pool, "page_size"), None)
        geometry = describe_pool(host_pool)
        namespace = self._identify(host_pool, geometry, name)
        placement = self._tier.mover.placement(geometry)
        if placement.staging_bytes > self._tier.staging.nbytes:
            raise RegistrationError(
                f"a page of {namespace} needs {placement.staging_bytes} bytes of staging, there "
                f"are {self._tier.staging.nbytes}; raise staging"
            )
        self._tier.guard.open_namespace(namespace)
        if all(other.host_pool is not host_pool for other in self._pools.values()):
            self._tier.register_pool(geometry)
        page_bytes = PageBytes(geometry, namespace, placement.in_place)
        return RegisteredPool(name, host_pool, geometry.page_tokens, page_bytes)


class StoredKeys:
    """Which pages of one sequence of keys are stored, pool by pool: `hybrid.Presence`.

    What cannot be told by `deadline` counts as not stored. A pool without bytes has every page.
    """

    def __init__(
        self, guard: Guard, pools: PoolTable, keys: Sequence[str], *, deadline: float
    ) -> None:
        self._guard = guard
        self._pools = pools
        self._deadline = deadline
        self._keys = [key_bytes(key) for key in keys]

    def leading_run(self, pool: str, pages: int) -> int:
        """How many of the first `pages` keys, from the first on, are stored."""
        page_bytes = self._pools[pool].page_bytes
        if page_bytes is None:
            return pages
        return self._guard.exists(
            page_bytes.namespace.digest, self._keys[:pages], deadline=self._deadline
        )

    def present(self, pool: str, pages: int) -> Flags:
        """Which of the first `pages` keys are stored, shape (pages,)."""
        page_bytes = self._pools[pool].page_bytes
        if page_bytes is None:
            return np.ones(pages, np.bool_)
        return self._guard.present(
            page_bytes.namespace.digest, self._keys[:pages], deadline=self._deadline
        )
