"""What a process can see of itself: what it tells NIXL, the pages behind an address, warnings."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Extents:
    """Extents of transfers, by where their memory is and how their file is open."""

    in_pool: int = 0
    in_staging: int = 0
    """In memory that is registered beside the pool."""
    unregistered: int = 0
    direct: int = 0
    """On files with O_DIRECT."""
    buffered: int = 0


class TransferWatch:
    """Sees registrations and transfers at NIXL's own interface, in all agents of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, list[tuple[int, int]]] = {}
        self._moved: list[tuple[int, int, bool]] = []
        self._files: list[bool] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator["TransferWatch"]:
        """For the length of a block."""
        from nixl._api import nixl_agent

        names = ("register_memory", "deregister_memory", "initialize_xfer")
        originals = {name: getattr(nixl_agent, name) for name in names}
        for name in names:
            setattr(nixl_agent, name, self._noting(getattr(self, f"_{name}"), originals[name]))
        try:
            yield self
        finally:
            for name in names:
                setattr(nixl_agent, name, originals[name])

    def take(self, pool: tuple[int, int]) -> Extents:
        """The extents since the last `take`; `pool` is the address and the bytes of a host pool."""
        start, nbytes = pool
        with self._lock:
            moved, self._moved = self._moved, []
            files, self._files = self._files, []
        in_pool = sum(start <= first and last <= start + nbytes for first, last, _ in moved)
        return Extents(
            in_pool=in_pool,
            in_staging=len(moved) - in_pool,
            unregistered=sum(not registered for *_, registered in moved),
            direct=sum(files),
            buffered=len(files) - sum(files),
        )

    def _noting(self, note: Callable[..., None], original: Any) -> Any:
        def noting(agent: Any, *arguments: Any, **named: Any) -> Any:
            with self._lock:
                note(agent, *arguments)
            return original(agent, *arguments, **named)

        return noting

    def _register_memory(self, agent: Any, descriptors: Any) -> None:
        if _kind(descriptors) == "DRAM":
            self._live.setdefault(agent.name, []).extend(_ranges(descriptors))

    def _deregister_memory(self, agent: Any, descriptors: Any) -> None:
        if _kind(descriptors) == "DRAM":
            for extent in _ranges(descriptors):
                self._live[agent.name].remove(extent)

    def _initialize_xfer(self, agent: Any, operation: str, memory: Any, place: Any, _: str) -> None:
        live = self._live.get(agent.name, [])
        for first, last in _ranges(memory):
            registered = any(start <= first and last <= end for start, end in live)
            self._moved.append((first, last, registered))
        if _kind(place) == "FILE":
            self._files += [is_direct(place[i][2]) for i in range(place.descCount())]


def _kind(descriptors: Any) -> str:
    """DRAM, FILE or OBJ."""
    return str(descriptors.getType().name).removesuffix("_SEG")


def _ranges(descriptors: Any) -> list[tuple[int, int]]:
    rows = [descriptors[i] for i in range(descriptors.descCount())]
    return [(row[0], row[0] + row[1]) for row in rows]


def is_direct(descriptor: int) -> bool:
    """Whether the kernel has a file open with O_DIRECT."""
    info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return bool(int(info.split("flags:")[1].split()[0], 8) & os.O_DIRECT)


def open_rings() -> int:
    """How many io_uring instances this process has."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "io_uring" in str(link.readlink())
    return found


def mapping(address: int) -> dict[str, int]:
    """The fields of /proc/self/smaps, in KiB, of the mapping that holds `address`."""
    fields: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.endswith(" kB"):
            name, value = line.split(":")
            fields[name] = int(value.removesuffix(" kB"))
    return fields


@contextlib.contextmanager
def warnings_of_library() -> Iterator[list[str]]:
    """What the library warns of in a block, or says that is worse."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    library = logging.getLogger("hicache_nixl")
    library.addHandler(handler)
    try:
        yield messages
    finally:
        library.removeHandler(handler)
