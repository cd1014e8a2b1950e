"""Which NIXL plug-in and I/O queue serve a store in directories, chosen by trying them for real.

Must not know what a store keeps in its directories.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hicache_nixl.errors import SettingsError, TransferError
from hicache_nixl.record import ALIGNMENT
from hicache_nixl.settings import Settings
from hicache_nixl.stores.slab_segments import direct_io_refused
from hicache_nixl.transfer import QUEUE_PARAMETERS, TransferEngine

PLUGINS = {"posix": "POSIX", "gds": "GDS", "gds_mt": "GDS_MT", "3fs": "HF3FS"}
"""Plug-ins that can serve files, by their names in the settings and in NIXL."""


@dataclass(frozen=True)
class IoChoice:
    """How this process will do I/O, and why."""

    plugin: str
    queue: str | None
    parameters: dict[str, str]
    direct_io: bool
    notes: tuple[str, ...] = ()
    """What was refused, one line each."""


def choose_io(settings: Settings, directories: Sequence[Path]) -> IoChoice:
    """What works here, by trying it: O_DIRECT in every directory, then the plug-in and its queue.

    Falls back from O_DIRECT to buffered I/O and from io_uring to AIO, with a note each. A plug-in
    that was asked for by name and does not work is a SettingsError.
    """
    notes = []
    direct_io = settings.use_direct_io
    if direct_io:
        refused = {d: why for d in directories if (why := direct_io_refused(d)) is not None}
        for directory, why in refused.items():
            direct_io = False
            notes.append(
                f"O_DIRECT is refused in {directory} ({why}); using buffered I/O. Use a file "
                "system that has it, such as ext4 or XFS, or set use_direct_io=false"
            )
    wanted = "posix" if settings.plugin == "auto" else settings.plugin
    if wanted not in PLUGINS:
        raise SettingsError(
            f"plugin={wanted!r} cannot serve a store in a directory; use one of "
            f"{', '.join(PLUGINS)}"
        )
    plugin = PLUGINS[wanted]
    given = settings.parameters_for(wanted)
    if plugin != "POSIX":
        try:
            _try(plugin, given, directories[0], direct_io)
        except (TransferError, OSError) as error:
            raise SettingsError(
                f"plugin={wanted!r} does not work here: {error}; use plugin=auto"
            ) from error
        return IoChoice(plugin, None, given, direct_io, tuple(notes))
    queues = ["aio"] if settings.queue == "aio" else ["uring", "aio"]
    for queue in queues:
        try:
            parameters = given | QUEUE_PARAMETERS[queue]
            _try(plugin, parameters, directories[0], direct_io)
        except (TransferError, OSError) as error:
            if queue == queues[-1]:
                raise TransferError(
                    f"no I/O queue of NIXL's POSIX plug-in works in {directories[0]}: {error}"
                ) from error
            notes.append(_uring_note(error))
            continue
        return IoChoice(plugin, queue, parameters, direct_io, tuple(notes))
    raise AssertionError("unreachable: the last queue returns or raises")


def without_uring(choice: IoChoice, settings: Settings, error: TransferError) -> IoChoice:
    """The choice when io_uring worked on trial and then did not: its rings count against a limit
    that all processes of a user share. Raises `error` where io_uring was not the choice."""
    if choice.queue != "uring":
        raise error
    parameters = settings.parameters_for("posix") | QUEUE_PARAMETERS["aio"]
    notes = (*choice.notes, _uring_note(error))
    return replace(choice, queue="aio", parameters=parameters, notes=notes)


def _uring_note(error: Exception) -> str:
    return f"io_uring does not work here ({error}); using AIO"


def _try(plugin: str, parameters: dict[str, str], directory: Path, direct_io: bool) -> None:
    """Write a block and read it back through a plug-in. Raises what goes wrong."""
    engine = TransferEngine(plugin, parameters)  # first: it often fails, and must leave no file
    path = directory / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0)
    descriptor = os.open(path, flags, 0o600)
    registrations = []
    try:
        os.ftruncate(descriptor, ALIGNMENT)  # not every file system can allocate
        block = mmap.mmap(-1, 2 * ALIGNMENT)
        view = np.frombuffer(block, np.uint8)
        view[:ALIGNMENT] = np.frombuffer(secrets.token_bytes(ALIGNMENT), np.uint8)
        address = view.ctypes.data
        registrations = [
            engine.register_memory(address, 2 * ALIGNMENT),
            engine.register_file(descriptor, ALIGNMENT),
        ]
        for operation, at in (("WRITE", address), ("READ", address + ALIGNMENT)):
            transfer = engine.post(
                "WRITE" if operation == "WRITE" else "READ",
                np.array([[at, ALIGNMENT, 0]], np.uint64),
                np.array([[0, ALIGNMENT, descriptor]], np.uint64),
            )
            transfer.wait(float("inf"))
        if not np.array_equal(view[:ALIGNMENT], view[ALIGNMENT:]):
            raise TransferError("what was read is not what was written")
    finally:
        for registration in registrations:
            engine.deregister(registration)
        engine.close()
        os.close(descriptor)
        path.unlink()
