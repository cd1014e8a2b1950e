"""Files stores for tests: whole ones that really do I/O, and a look behind them.

Users, keys, pages and movers are those of `slabs`.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from hicache_nixl.stores import files_pages
from hicache_nixl.stores.files import FilesStore
from slabs import KIB, MIB, PlainMover, Tenant, namespace, start_child
from support import host_pool, make_mover

INTERVAL_S = 0.05
"""Between two rounds of a store's housekeeping in tests."""
CHANCE = 1.1
"""What a store of some hundred pages holds at most, in parts of its capacity: new pages are taken
to be spread evenly over directories that were not yet looked at, and chance does not do that."""


@contextmanager
def open_files_tenant(
    directory: Path,
    *,
    capacity: int = 64 * MIB,
    payload: int = 4 * KIB,
    segments: int = 1,
    pages: int = 128,
    model: str = "model",
    aligned: bool = True,
    checks_payload: bool = True,
    direct_io: bool = True,
    timeout_s: float = 30.0,
    staging: int = 16 * MIB,
    host: str | None = None,
) -> Iterator[Tenant]:
    """A store that knows how full it is and a user of it, closed at the end."""
    pool = host_pool(1, pages, segments, payload // segments, aligned)
    with make_mover(
        pool, staging_bytes=staging, checks_payload=checks_payload, direct_io=direct_io
    ) as rig:
        store = FilesStore(
            directory,
            capacity_bytes=capacity,
            reader=rig.reader,
            writer=rig.writer,
            direct_io=direct_io,
            timeout_s=timeout_s,
            host=host,
            interval_s=INTERVAL_S,
        )
        try:
            tenant = Tenant(store, rig.mover, pool, namespace(payload, model))
            wait_until(lambda: store._ledger.usage is not None)
            yield tenant
        finally:
            rig.reader.drain()
            rig.writer.drain()
            store.close()


@contextmanager
def open_plain_files(
    directory: Path,
    *,
    capacity: int = 64 * MIB,
    payload: int = 4 * KIB,
    pages: int = 128,
    model: str = "model",
    timeout_s: float = 30.0,
    host: str | None = None,
    interval_s: float = INTERVAL_S,
    expiry_s: float = 30.0,
    keeps_house: bool = True,
) -> Iterator[Tenant]:
    """As `open_files_tenant`, without NIXL: fast to open, and no O_DIRECT."""
    store = FilesStore(
        directory,
        capacity_bytes=capacity,
        direct_io=False,
        timeout_s=timeout_s,
        keeps_house=keeps_house,
        host=host,
        interval_s=interval_s,
        expiry_s=expiry_s,
    )
    pool = host_pool(1, pages, 1, payload)
    with closing(store):
        tenant = Tenant(store, PlainMover(), pool, namespace(payload, model))
        if keeps_house:
            wait_until(lambda: store._ledger.usage is not None)
        yield tenant


def start_files_child(function: str, *arguments: object, **environment: str) -> subprocess.Popen:
    """Run `files_children.<function>(*arguments)` in a process of its own; see `start_child`."""
    return start_child(function, *arguments, module="files_children", **environment)


# -- behind the store --------------------------------------------------------------------------


def page_files(directory: Path) -> list[Path]:
    """Every page of every namespace."""
    found = (directory / "namespaces").glob("?*/??/??/*")
    return sorted(path for path in found if len(path.name) == 64)


def leftovers(directory: Path) -> list[Path]:
    """Every page that is being written, or was."""
    return sorted((directory / "namespaces").rglob(".*.*"))


def page_file(directory: Path, page_key: bytes) -> Path:
    """The file of a key, in the one namespace that has it."""
    (path,) = (directory / "namespaces").glob(f"*/??/??/{page_key.hex()}")
    return path


def stored_bytes(directory: Path) -> int:
    """Bytes of all page files, finished or not."""
    nbytes = 0
    for path in [*page_files(directory), *leftovers(directory)]:
        with suppress(FileNotFoundError):
            nbytes += path.stat().st_size
    return nbytes


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what another thread or process is to do; AssertionError if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def wait_for_a_round(tenant: Tenant) -> None:
    """Wait until a round of the store's housekeeping that begins from now on is over, but for
    telling of it."""
    house = tenant.store._house
    rounds = house._rounds + 3  # one counts twice at most, and one may be under way
    house.hurry()
    wait_until(lambda: house._rounds >= rounds)


@contextmanager
def slow_calls(seconds: float) -> Iterator[None]:
    """A file system on which looking at a page takes this long."""
    fast = files_pages.stat_page

    def stat_page(path: str, directory: int) -> os.stat_result:
        time.sleep(seconds)
        return fast(path, directory)

    files_pages.stat_page = stat_page
    try:
        yield
    finally:
        files_pages.stat_page = fast
