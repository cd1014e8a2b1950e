"""Stores in directories, put together from settings as the connector does it, without SGLang.

    python -m disk_child FUNCTION ARGUMENTS

Prints lines of JSON; an assertion that does not hold ends it with a traceback.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import slabs
from filestores import (
    leftovers,
    open_files_tenant,
    open_plain_files,
    page_files,
    stored_bytes,
    wait_until,
)
from hicache_nixl.settings import load_settings
from hicache_nixl.startup import assemble
from observed import TransferWatch, open_rings, warnings_of_library
from slab_children import say
from support import host_pool

PAYLOAD = 256 << 10
PAGES = 128
ROOM = 40
"""Records for which there is room on a disk that is full."""
SLAB_RESERVE = 32 << 20
"""What a slab store leaves free for its index."""
RETRY_S = 30.0
"""A slab store tries seldom to grow on a full disk."""
_IO_URING_SETUP = 425


@contextlib.contextmanager
def _open(store: str, **settings: Any) -> Iterator[slabs.Tenant]:
    """A user of a store behind its guard, with a pool that can move in place."""
    given = {"store": store, "staging": "8MiB", "capacity": "64MiB", **settings}
    tier = assemble(load_settings(given))
    pool = host_pool(1, PAGES, 1, PAYLOAD)
    try:
        tier.register_pool(pool.geometry)
        space = slabs.namespace(PAYLOAD)
        yield slabs.Tenant(tier.guard, tier.mover, pool, space)  # type: ignore[arg-type]
    finally:
        tier.close()


def allowed(directory: str) -> None:
    """Say what the kernel allows here."""
    say({"O_DIRECT": _direct_io(Path(directory)), "io_uring": _has_io_uring()})


def round_trips(stores: list[str], settings: dict[str, Any]) -> None:
    """Pages through each of the stores; says what `allowed` does, and for each store what was
    moved how."""
    allowed(str(Path(urlsplit(stores[0]).path).parent))
    keys = slabs.chain_keys("a", PAGES)
    for store in stores:
        with (
            warnings_of_library() as warnings,
            TransferWatch().watching() as watch,
            _open(store, **settings) as tenant,
        ):
            watch.take((0, 0))  # what the start has tried
            stored, read = sum(tenant.put(keys)), sum(tenant.get(keys))
            memory = tenant.pool.memory
            extents = asdict(watch.take((memory.ctypes.data, memory.nbytes)))
            rings = open_rings()
        say(
            {
                "stored": stored,
                "read": read,
                "rings": rings,
                "extents": extents,
                "warnings": warnings,
            }
        )


def _direct_io(directory: Path) -> bool:
    """Whether the kernel takes O_DIRECT there."""
    path = directory / "asked"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _has_io_uring() -> bool:
    parameters = ctypes.create_string_buffer(120)
    descriptor = ctypes.CDLL(None).syscall(_IO_URING_SETUP, 8, parameters)
    if descriptor < 0:
        return False
    os.close(descriptor)
    return True


def fill_up(kind: str, directory: str) -> None:
    """Put pages where few fit, then make room; says how many were stored while it was full."""
    root = Path(directory)
    keys = slabs.chain_keys("a", PAGES)
    record_bytes = PAYLOAD + 4096
    room = ROOM * record_bytes + (SLAB_RESERVE if kind == "slab" else 0)
    segment = {"segment": 4 * record_bytes} if kind == "slab" else {}
    with _open(f"{kind}://{root}", capacity="1GiB", **segment) as tenant:
        filler = root.parent / "filler"
        with filler.open("wb") as file:
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            os.posix_fallocate(file.fileno(), 0, free - room)
        flags = tenant.put(keys)
        # One by one: a call need not look behind the first page that is missing.
        assert [tenant.get([key])[0] for key in keys] == flags
        filler.unlink()
        end = time.monotonic() + RETRY_S
        while not all(tenant.put(keys)):
            assert time.monotonic() < end, "not stored, although there is room"
            time.sleep(0.2)
        assert all(tenant.get(keys))
    _check_left(kind, root, record_bytes)
    say(sum(flags))


def _check_left(kind: str, root: Path, record_bytes: int) -> None:
    """A closed store has its pages and nothing else."""
    if kind == "slab":
        slots = slabs.check_slots(root)
        assert (slots.pages, slots.claimed) == (PAGES, 0)
        slabs.check_files([root])
    else:
        assert not leftovers(root)
        assert len(page_files(root)) == PAGES
        assert stored_bytes(root) == PAGES * record_bytes


def check_after_crash(
    directory: str, told: list[tuple[list[Any], int, int]], options: dict[str, Any]
) -> None:
    """Check a files store whose writers were killed; `told` is what they said. Says how many
    pages they had begun and not finished."""
    root = Path(directory)
    begun = leftovers(root)
    with open_files_tenant(root, **options) as tenant:
        for name, count, _ in told:
            tenant.get(slabs.chain_keys(tuple(name), count))  # raises for a wrong byte
        name, count, stored = told[-1]
        assert tenant.exists(slabs.chain_keys(tuple(name), count)) >= stored
        verified = list(tenant.store.verify())
        assert len(verified) == len(page_files(root))
        assert all(page.good for page in verified)
    # Writers of another host may live: what they left is removed after an hour.
    long_ago = time.time() - 2 * 3600
    for path in begun:
        os.utime(path, (long_ago, long_ago))
    with open_plain_files(root, expiry_s=1.0, **options):
        wait_until(lambda: not leftovers(root), 60)
    say(len(begun))


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
