"""What a store is: pages go in under a namespace and a key, and come out or are missing.

Implemented by `slab.SlabStore` and `files.FilesStore`. A store knows records and extents; it knows
nothing of SGLang.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Batch
from hicache_nixl.identity import Namespace
from hicache_nixl.mover import RecordMover

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NamespaceUse:
    """What one namespace holds in a store."""

    namespace: Namespace
    pages: int
    record_bytes: int
    """Bytes of all its records together."""
    oldest_use_ns: int
    newest_use_ns: int


@dataclass(frozen=True)
class StoreUse:
    """How full a store is; bytes."""

    capacity_bytes: int
    allocated_bytes: int
    pages: int
    evicted_pages: int


@dataclass(frozen=True)
class CheckedPage:
    """One page that `verify` has read."""

    namespace: bytes
    key: bytes
    good: bool


class Store(Protocol):
    """Trouble with a page is no exception: it is then missing or not written. StoreError is raised
    where nothing can be said of any, for instance because an index cannot be used.

    `prefix` are the keys before those of the call, from the start of the sequence, if known: they
    are in use too, and what is stored of them must not be evicted before what follows them.
    """

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace usable. Raises StoreError or RegistrationError. Idempotent."""

    def put(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Store pages; True for each page that is stored now. Blocks until `deadline` at most."""

    def get(
        self, mover: RecordMover, batch: Batch, prefix: Sequence[bytes], *, deadline: float
    ) -> Flags:
        """Read pages into their host pages; True for each that is there, whole and right."""

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is stored."""

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> Flags:
        """Which of `keys` are stored, shape (n,); one look at the index for all of them."""

    def clear(self, namespace: bytes) -> int:
        """Forget every page of one namespace; the number of pages that went."""

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace."""

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page; damaged ones are forgotten."""

    def use(self) -> StoreUse:
        """How full the store is."""

    def close(self) -> None:
        """Release files and registrations. Idempotent."""
