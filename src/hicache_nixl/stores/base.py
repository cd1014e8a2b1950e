"""What a store is: pages go in under a namespace and a key, and come out or are missing.

Implemented by `slab.SlabStore`, `files.FilesStore` and `objects.ObjectsStore`. A store knows
records and where they lie; it knows nothing of SGLang.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Batch
from hicache_nixl.identity import Namespace
from hicache_nixl.mover import RecordMover

Flags = npt.NDArray[np.bool_]
Direction = Literal["read", "write"]


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
    """How full a store is; bytes. None where the store cannot tell, or keeps no budget itself."""

    capacity_bytes: int | None
    allocated_bytes: int | None
    pages: int | None
    evicted_pages: int | None


@dataclass(frozen=True)
class CheckedPage:
    """One page that `verify` has read."""

    namespace: bytes
    key: bytes
    good: bool


class Store(Protocol):
    """Trouble with a page is no exception: it is then missing or not written. StoreError is raised
    where no page could be served because storage is in trouble: an index that cannot be used, or
    reads or writes that all failed. That a page is missing, damaged, or finds no room is no
    trouble.

    Calls may come from any thread, and one may still be under way when its caller has given up.
    Deadlines are those of `time.monotonic`; a store does what it can to keep them, and a kernel or
    server that hangs can defeat it. Nothing may touch the host pages of a batch but inside
    `batch.loan.using()`.

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

    def check(self, direction: Direction, *, deadline: float) -> None:
        """Try whether reading or writing works: one small operation for real, along the way that
        pages take. Leaves nothing behind. Raises StoreError if it does not; a store without room
        for more pages is well."""

    def clear(self, namespace: bytes, *, deadline: float = math.inf) -> int:
        """Forget every page of one namespace; the number of pages that went.

        StoreError where not all could go by `deadline`; another call goes on from there.
        """

    def namespaces(self) -> list[NamespaceUse]:
        """What is stored, a row a namespace."""

    def verify(self, namespace: bytes | None = None) -> Iterator[CheckedPage]:
        """Read and check every page; damaged ones are forgotten."""

    def use(self) -> StoreUse:
        """How full the store is."""

    def close(self) -> None:
        """Release files and registrations. Idempotent."""
