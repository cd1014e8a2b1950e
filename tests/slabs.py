"""Slab stores for tests: whole ones that really do I/O, and a look behind them.

Every page has bytes of its own, made from model and key, so that whatever comes back can be checked
without having been kept.
"""

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hicache_nixl import record
from hicache_nixl.batch import Batch, Extents, OnLate, Outcome, Outcomes, WriteStamp
from hicache_nixl.identity import FORMAT_VERSION, Namespace, _seal
from hicache_nixl.mover import RecordMover
from hicache_nixl.stores.base import Flags
from hicache_nixl.stores.slab import SlabStore
from hicache_nixl.stores.slab_sql import unpack_slots
from support import HostPool, host_pool, make_mover

KIB = 1024
MIB = 1024 * KIB
DEADLINE_S = 30.0


class WrongBytesError(AssertionError):
    """A page was reported as read, and is not the one that was stored."""


def namespace(payload_bytes: int, model: str = "model") -> Namespace:
    """A namespace as the connector makes it."""
    return _seal(
        {
            "format": FORMAT_VERSION,
            "model_name": model,
            "model_revision": None,
            "salt": None,
            "pool": "kv",
            "pool_class": "MHATokenToKVPoolHost",
            "storage_format_tag": None,
            "kv_dtype": "bfloat16",
            "byte_order": "layer-major",
            "page": {"layers": 1},
            "page_tokens": 1,
            "payload_bytes": payload_bytes,
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "cp_rank": 0,
            "cp_size": 1,
            "dcp_rank": 0,
            "dcp_size": 1,
        }
    )


def key(*parts: object) -> bytes:
    """A key, as spread as those of the engine."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def chain_keys(name: object, count: int, start: int = 0) -> list[bytes]:
    """The keys of one prefix."""
    return [key(name, i) for i in range(start, start + count)]


def page_bytes(model: str, page_key: bytes, nbytes: int) -> np.ndarray:
    """What belongs under a key."""
    seed = int.from_bytes(hashlib.blake2b(model.encode() + page_key, digest_size=8).digest())
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(nbytes), np.uint8)


class PlainMover:
    """Moves records with ordinary reads and writes, without NIXL."""

    checks_payload = True

    def write(
        self, batch: Batch, extents: Extents, stamp: WriteStamp, *, deadline: float, on_late: OnLate
    ) -> Outcomes:
        payload = batch.geometry.payload_bytes
        size = record.record_bytes(payload)
        records = np.zeros((len(batch.keys), size), np.uint8)
        batch.geometry.gather(batch.numbers, records)
        record.write_trailers(
            records[:, -record.TRAILER_BYTES :],
            namespace=batch.namespace,
            keys=batch.keys,
            depths=stamp.depths,
            payload_bytes=payload,
            payload_hashes=[record.payload_hash(row[:payload]) for row in records],
            generation=stamp.generation,
            written_ns=time.time_ns(),
            writer=stamp.writer,
        )
        for row, file, offset in zip(records, extents.files, extents.offsets, strict=True):
            os.pwrite(file, row, offset)
        return np.full(len(records), Outcome.GOOD, np.int8)

    def read(
        self,
        batch: Batch,
        extents: Extents,
        generations: np.ndarray | None,
        *,
        deadline: float,
        on_late: OnLate,
    ) -> Outcomes:
        payload = batch.geometry.payload_bytes
        outcomes = np.full(len(batch.keys), Outcome.FAILED, np.int8)
        for i, page_key in enumerate(batch.keys):
            block = os.pread(
                extents.files[i], record.record_bytes(payload), int(extents.offsets[i])
            )
            if len(block) < record.record_bytes(payload):
                continue
            row = np.frombuffer(block, np.uint8)
            trailer = row[None, -record.TRAILER_BYTES :]
            good = (
                record.check_trailers(
                    trailer,
                    namespace=batch.namespace,
                    keys=[page_key],
                    payload_bytes=payload,
                    generations=None if generations is None else generations[i : i + 1],
                )[0]
                and record.payload_hash(row[:payload]) == record.stored_payload_hashes(trailer)[0]
            )
            outcomes[i] = Outcome.GOOD if good else Outcome.FOREIGN
            if good:
                batch.geometry.scatter(batch.numbers[i : i + 1], row[None, :payload])
        return outcomes


class Tenant:
    """One user of a store: a namespace, a host pool and what moves between them."""

    def __init__(
        self, store: SlabStore, mover: RecordMover | PlainMover, pool: HostPool, space: Namespace
    ) -> None:
        self.store = store
        self.mover = mover
        self.pool = pool
        self.namespace = space
        self.model = str(space.manifest["model_name"])
        self.deadline_s = DEADLINE_S
        store.open_namespace(space)

    @property
    def record_bytes(self) -> int:
        return record.record_bytes(self.namespace.payload_bytes)

    def put(self, keys: Sequence[bytes], prefix: Sequence[bytes] = (), at: int = 0) -> list[bool]:
        """Store the pages of `keys`, from host pages `at` and up."""
        for number, page_key in enumerate(keys, at):
            self._write_host(number, page_bytes(self.model, page_key, self._payload))
        return self._move(self.store.put, keys, prefix, at).tolist()

    def get(self, keys: Sequence[bytes], prefix: Sequence[bytes] = (), at: int = 0) -> list[bool]:
        """Read the pages of `keys`; WrongBytesError if one that is reported is not right."""
        for number in range(at, at + len(keys)):
            self._write_host(number, np.uint8(0))
        flags = self._move(self.store.get, keys, prefix, at)
        for i in np.flatnonzero(flags):
            expected = page_bytes(self.model, keys[i], self._payload).tobytes()
            if self.pool.page(at + i) != expected:
                raise WrongBytesError(f"page {i} of {len(keys)} ({keys[i].hex()[:8]})")
        return flags.tolist()

    def exists(self, keys: Sequence[bytes]) -> int:
        return self.store.exists(self.namespace.digest, keys)

    def readable(self, keys: Sequence[bytes]) -> int:
        """Pages that can be read one by one, wherever they are."""
        return sum(self.get([page_key])[0] for page_key in keys)

    @property
    def _payload(self) -> int:
        return self.namespace.payload_bytes

    def _move(
        self,
        operation: Callable[..., Flags],
        keys: Sequence[bytes],
        prefix: Sequence[bytes],
        at: int,
    ) -> Flags:
        numbers = np.arange(at, at + len(keys))
        batch = Batch(self.pool.geometry, numbers, list(keys), self.namespace.digest)
        return operation(self.mover, batch, prefix, deadline=time.monotonic() + self.deadline_s)

    def _write_host(self, number: int, content: np.ndarray | np.uint8) -> None:
        start = 0
        for window in self.pool.geometry.windows:
            end = start + window.shape[1]
            window[number] = content if np.ndim(content) == 0 else content[start:end]
            start = end


@contextmanager
def open_tenant(
    directories: Path | Sequence[Path],
    *,
    capacity: int = 64 * MIB,
    segment: int | None = None,
    payload: int = 4 * KIB,
    segments: int = 1,
    pages: int = 128,
    model: str = "model",
    aligned: bool = True,
    checks_payload: bool = True,
    direct_io: bool = True,
    busy_timeout_s: float = 10.0,
    staging: int = 16 * MIB,
) -> Iterator[Tenant]:
    """A store and a user of it, closed at the end."""
    pool = host_pool(1, pages, segments, payload // segments, aligned)
    with make_mover(
        pool, staging_bytes=staging, checks_payload=checks_payload, direct_io=direct_io
    ) as rig:
        store = SlabStore(
            [directories] if isinstance(directories, Path) else directories,
            capacity_bytes=capacity,
            segment_bytes=segment,
            engines=(rig.reader, rig.writer),
            direct_io=direct_io,
            busy_timeout_s=busy_timeout_s,
        )
        try:
            yield Tenant(store, rig.mover, pool, namespace(payload, model))
        finally:
            rig.reader.drain()
            rig.writer.drain()
            store.close()


@contextmanager
def open_plain(
    directories: Path | Sequence[Path],
    *,
    capacity: int = 64 * MIB,
    segment: int | None = None,
    payload: int = 4 * KIB,
    pages: int = 128,
    model: str = "model",
    busy_timeout_s: float = 10.0,
) -> Iterator[Tenant]:
    """As `open_tenant`, without NIXL: fast to open, and no O_DIRECT."""
    store = SlabStore(
        [directories] if isinstance(directories, Path) else directories,
        capacity_bytes=capacity,
        segment_bytes=segment,
        direct_io=False,
        busy_timeout_s=busy_timeout_s,
    )
    pool = host_pool(1, pages, 1, payload)
    with closing(store):
        yield Tenant(store, PlainMover(), pool, namespace(payload, model))


# -- behind the store -------------------------------------------------------------------------


def query(directory: Path, statement: str, parameters: Sequence[object] = ()) -> list[tuple]:
    """Rows of the index, read past the store."""
    with closing(sqlite3.connect(directory / "index.sqlite", timeout=30)) as connection:
        return connection.execute(statement, parameters).fetchall()


@dataclass
class Slots:
    """Where every slot of a store is, and the pages it holds."""

    pages: int
    vacant: int
    claimed: int
    fresh: int


def check_slots(directory: Path) -> Slots:
    """Every slot is in exactly one of pages, vacant, claims and the fresh end of its segment."""
    with closing(sqlite3.connect(directory / "index.sqlite", timeout=30)) as connection:
        connection.execute("BEGIN")
        ask = connection.execute
        segments = {
            id_: (size, slots, fresh)
            for id_, size, slots, fresh in ask(
                "SELECT id, record_bytes, slots, fresh FROM segments"
            )
        }
        pages = ask("SELECT segment, slot, record_bytes FROM pages").fetchall()
        vacant = ask("SELECT segment, slot, record_bytes FROM vacant").fetchall()
        claimed = [
            (segment, slot, size)
            for size, packed in ask("SELECT record_bytes, slots FROM claims")
            for segment, slot in unpack_slots(packed)
        ]
        assert ask("PRAGMA integrity_check").fetchall() == [("ok",)]
    placed = pages + vacant + claimed
    assert len({row[:2] for row in placed}) == len(placed), "a slot is in two places"
    for segment, slot, size in placed:
        assert size == segments[segment][0]
        assert 0 <= slot < segments[segment][2], "a fresh slot is in use"
    written = sum(fresh for _, _, fresh in segments.values())
    assert len(placed) == written, "a slot is nowhere"
    fresh = sum(slots for _, slots, _ in segments.values()) - written
    return Slots(len(pages), len(vacant), len(claimed), fresh)


def allocated(directories: Iterable[Path]) -> int:
    """Bytes that segment files take on disk."""
    return sum(
        path.stat().st_blocks * 512
        for directory in directories
        for path in directory.glob("segment-*.slab")
    )


def check_files(directories: Sequence[Path]) -> None:
    """The segment files are those of the index, in full, and nothing else lies around."""
    known = {
        f"segment-{id_:08d}-{size}.slab": (directories[number], size * slots)
        for id_, number, size, slots in query(
            directories[0], "SELECT id, directory, record_bytes, slots FROM segments"
        )
    }
    there = {path.name: path for d in directories for path in d.glob("segment-*")}
    assert there.keys() == known.keys()
    for name, (directory, nbytes) in known.items():
        assert there[name].parent == directory
        assert there[name].stat().st_size == nbytes
    strays = {
        path.name
        for directory in directories
        for path in directory.iterdir()
        if not path.name.startswith(("segment-", "index.sqlite"))
    }
    assert strays <= {"lock", "writers", "namespaces", "store.json"}


def check_after_crash(root: Path, told: list[tuple[Any, int]], capacity: int, **how: Any) -> None:
    """What is reported is right, unfinished slots are free, and all of the store is usable."""
    with open_tenant(root, capacity=capacity, **how) as tenant:
        slots = check_slots(root)
        assert slots.claimed == 0
        check_files([root])
        for name, count in told:
            tenant.get(chain_keys(name, count))  # raises for a wrong byte
        assert sum(page.good for page in tenant.store.verify()) == slots.pages
        if told:
            # What was told last is newest, so nothing has evicted it.
            assert tenant.exists(chain_keys(*told[-1])) == told[-1][1]
        for number in range(capacity // tenant.record_bytes // 64 + 1):
            assert all(tenant.put(chain_keys(("after", number), 64)))
        assert check_slots(root).pages == capacity // tenant.record_bytes
    check_files([root])


def lose_index(directory: Path) -> None:
    """Delete the index of a closed store."""
    for path in directory.glob("index.sqlite*"):
        path.unlink()


def in_threads(work: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    """Run `work` once for each argument, all at the same time; raises what one of them raised."""
    arguments = list(arguments)
    with ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(work, arguments))


def open_files(kind: str = "") -> int:
    """Descriptors of this process on files whose path contains `kind`."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += kind in str(link.readlink())
    return count


# -- other processes --------------------------------------------------------------------------


def start_child(
    function: str, *arguments: object, module: str = "slab_children", **environment: str
) -> subprocess.Popen[str]:
    """Run `<module>.<function>(*arguments)` in a process of its own; arguments as JSON.

    What it prints goes to a pipe.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, function, json.dumps(arguments, default=str)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
            "NIXL_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        }
        | environment,
    )


def finish(child: subprocess.Popen[str], timeout: float = 120) -> str:
    """What a child printed, after it ended well."""
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    assert child.returncode == 0, output
    return output
