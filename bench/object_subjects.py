"""Both connectors on a bucket. Owns how each is configured for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from bench.object_place import ObjectPlace
from bench.object_raw import BareObjects, RawClient
from bench.plan import BenchError
from bench.pools import HostPages
from bench.subjects import ConnectorSubject, Ours, storage_config

_RETRIES = ("AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS")


class ObjectSubject(Protocol):
    """One way to keep pages in a bucket.

    `load` and `unload` are not measured: they carry pages between the host pool and memory of the
    subject's own, where it has any.
    """

    name: str

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:
        """Connect and register the pool."""

    def load(self) -> None:
        """Before `set`."""

    def set(self, keys: Sequence[str]) -> list[bool]:
        """Store one page per key; True where it is stored."""

    def get(self, keys: Sequence[str]) -> list[bool]:
        """Load one page per key; True where it is loaded."""

    def unload(self) -> None:
        """After `get`."""

    def close(self) -> None:
        """Let go of connections and registrations; the objects stay."""


class OursOnObjects(Ours):
    """This project's connector on an object store, payload checksums verified."""

    name = "objects"

    def __init__(self, place: ObjectPlace) -> None:
        super().__init__()
        self._place = place

    def store_settings(self, directory: Path, capacity: int) -> dict[str, object]:  # noqa: ARG002
        place = self._place
        return {
            "store": f"s3://{place.bucket}/ours?endpoint={place.endpoint}&region={place.region}",
            "requests": place.concurrency,
            "access_key": place.access_key,
            "secret_key": place.secret_key,
        }

    def load(self) -> None:
        """Nothing: a connector moves the host pool's own pages."""

    def unload(self) -> None:
        """Nothing."""


class InTreeOnObjects(ConnectorSubject):
    """SGLang's NIXL connector with its OBJ plug-in: K and V of a page are two objects where it
    moves them in place, and one where it copies."""

    name = "in-tree"

    def __init__(self, place: ObjectPlace) -> None:
        super().__init__()
        self._place = place

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:  # noqa: ARG002
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        section = {"active": True, **self._place.nixl_parameters()}
        config = storage_config(host, {"plugin": {"obj": section}})
        with _retries_as_shipped():
            try:
                connector = HiCacheNixl(config)
            except RuntimeError as error:
                raise BenchError(f"in-tree on objects: {error}") from error
        self._adopt(connector, host)

    def load(self) -> None:
        """Nothing: a connector moves the host pool's own pages."""

    def unload(self) -> None:
        """Nothing."""


def make_object_subjects(names: Sequence[str], place: ObjectPlace) -> list[ObjectSubject]:
    """The subjects of `names` that keep objects."""
    known = (OursOnObjects, InTreeOnObjects, BareObjects, RawClient)
    return [kind(place) for kind in known if kind.name in names]


@contextmanager
def _retries_as_shipped() -> Iterator[None]:
    """Without what ours set for the whole process."""
    kept = {name: os.environ.pop(name) for name in _RETRIES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
