"""What every store in a directory needs: making it, files written whole, errors in one line."""

import contextlib
import errno
import json
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from hicache_nixl.errors import HiCacheNixlError, StoreError

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a small JSON file can raise that is damaged or not ours: no such key, numbers that
are none, nesting without end."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a medium says that works, but is full."""
_BLOCK = 4096


def make_directory(directory: Path) -> None:
    """Make a directory whose parent exists, or see that it can be used. Raises StoreError."""
    if not directory.parent.is_dir():
        raise StoreError(
            f"{directory} cannot hold a store: {directory.parent} "
            + (
                "is no directory; name another"
                if directory.parent.exists()
                else "does not exist; mount or create it"
            )
        )
    with as_store_error(directory), contextlib.suppress(FileExistsError):
        directory.mkdir()
    if not directory.is_dir():
        raise StoreError(f"{directory} cannot hold a store: it is no directory; name another")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(
            f"{directory} cannot hold a store: not writable for uid {os.getuid()}; "
            "change its owner or mount it writable"
        )


def write_json(path: Path, content: object, *, durable: bool = True) -> None:
    """Write whole or not at all; `durable`, to last through a power loss. Raises StoreError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with as_store_error(path):
        try:
            with draft.open("w") as file:
                json.dump(content, file, indent=1, sort_keys=True)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            draft.rename(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        if not durable:
            return
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read_block(path: Path, *, direct_io: bool) -> None:
    """Read the first 4 KiB of a file, from the medium with `direct_io`. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0))
    try:
        with mmap.mmap(-1, _BLOCK) as block:
            os.preadv(descriptor, [block], 0)
    finally:
        os.close(descriptor)


def write_and_read_back(directory: Path, *, direct_io: bool) -> None:
    """Write a block into a new file of a directory, read it again, remove it. Raises OSError.

    A directory without room for it is none the worse.
    """
    path = directory / f".check-{os.getpid()}-{secrets.token_hex(4)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if direct_io else 0), 0o600)
    except OSError as error:
        if error.errno in NO_ROOM:
            return
        raise
    try:
        path.unlink()  # so that it does not stay, whatever happens
        with mmap.mmap(-1, _BLOCK) as written, mmap.mmap(-1, _BLOCK) as read:
            written[:] = secrets.token_bytes(_BLOCK)
            os.pwritev(descriptor, [written], 0)
            os.preadv(descriptor, [read], 0)
            if read[:] != written[:]:
                raise OSError(errno.EIO, "what was read is not what was written", str(directory))
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def as_store_error(path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the file, or `path` where it names none."""
    try:
        yield
    except HiCacheNixlError:
        raise
    except OSError as error:
        raise StoreError(
            f"{error.filename or path} cannot be used for a store: {error.strerror or error}"
        ) from error
