"""Names in a files store: what lies where, who wrote it, and what is none of its business.

    <directory>/store.json                                    format
    <directory>/namespaces/<digest>/manifest.json             what the pages are
    <directory>/namespaces/<digest>/<ab>/<cd>/<key>           one page record; its key is <abcd...>
    <directory>/namespaces/<digest>/<ab>/<cd>/.<key>.<owner>.<n>   a record that is being written
    <directory>/writers/<owner>                               files_ledger.py
    <directory>/usage.json                                    files_ledger.py
    <directory>/sweeper/<epoch>                               files_lease.py

Digests and keys are 64 hexadecimal digits, so 256 x 256 directories hold the pages of a namespace.
Whatever has another name belongs to somebody else and is left alone.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache_nixl.errors import HiCacheNixlError, StoreError, StoreFormatError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores.directory import (
    UNREADABLE,
    as_store_error,
    make_directory,
    write_json,
)

logger = logging.getLogger(__name__)

FORMAT = 1
KIND = "files"
FAN_OUT = tuple(f"{number:02x}" for number in range(256))
_FAN_OUT = frozenset(FAN_OUT)
_HEX_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEMPORARY = re.compile(r"\.([0-9a-f]{64})\.([A-Za-z0-9-]+\.\d+\.\d+\.[0-9a-f]+)\.\d+", re.ASCII)

_DRAFT = re.compile(r"\.(store|usage|manifest)\.json\.[0-9a-f]{8}", re.ASCII)


# -- who ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """One open store in one process on one host, as its files name it."""

    host: str
    pid: int
    started: int
    """Clock tick at which the process started, so that a reused pid is told apart."""
    instance: str

    def __str__(self) -> str:
        return f"{self.host}.{self.pid}.{self.started}.{self.instance}"

    @classmethod
    def of_this_process(cls, host: str | None = None) -> "Owner":
        """A new owner; `host` is `this_host()` if None."""
        pid = os.getpid()
        return cls(host or this_host(), pid, _start_of(pid) or 0, secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """The owner of that name, None if it is none."""
        host, *rest = text.split(".")
        try:
            pid, started, instance = rest
            return cls(host, int(pid), int(started), instance)
        except ValueError:
            return None

    def knows_dead(self, name: str) -> bool:
        """Whether `name` is an owner on this host whose process has ended."""
        other = Owner.parse(name)
        if other is None or other.host != self.host:
            return False
        started = _start_of(other.pid)
        return started is None or other.started not in (0, started)


def this_host() -> str:
    """The host's name, made unique by its boot and by the process namespace of a container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        processes = str(Path("/proc/self/ns/pid").readlink())
        return _host_id(socket.gethostname(), boot + processes)
    return _host_id(socket.gethostname(), secrets.token_hex(16))


def _host_id(name: str, boot: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9-]", "-", name)[:40]
    return f"{readable}-{hashlib.blake2b(boot.encode(), digest_size=6).hexdigest()}"


def _start_of(pid: int) -> int | None:
    """When a process of this host started, in clock ticks; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


# -- where -------------------------------------------------------------------------------------


def page_path(key: bytes) -> str:
    """Where the page of a key lies, below its namespace."""
    name = key.hex()
    return f"{name[:2]}/{name[2:4]}/{name}"


def temporary_path(key: bytes, owner: Owner, number: int) -> str:
    """Where a page is written first: beside its place, so that a rename never leaves a directory,
    and that directory cannot go meanwhile."""
    name = key.hex()
    return f"{name[:2]}/{name[2:4]}/.{name}.{owner}.{number}"


@dataclass(frozen=True)
class Entry:
    """A file of the store as a directory listing shows it."""

    path: str
    key: bytes
    nbytes: int
    mtime_ns: int
    owner: str | None
    """Who is writing it; None for a page."""


def names_in(directory: str | Path) -> list[str]:
    """What lies in a directory. Raises OSError."""
    with os.scandir(directory) as listing:
        return [entry.name for entry in listing]


def entries_of(leaf: str) -> list[Entry]:
    """The store's files in a directory of the lowest level. OSError where it cannot be read."""
    found = []
    place = leaf[-5:-3] + leaf[-2:]
    try:
        with os.scandir(leaf) as listing:
            for entry in listing:
                name, owner = entry.name, None
                if temporary := _TEMPORARY.fullmatch(name):
                    name, owner = temporary.groups()
                elif not _HEX_NAME.fullmatch(name):
                    continue
                if not name.startswith(place):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        continue
                    found.append(
                        Entry(
                            entry.path, bytes.fromhex(name), facts.st_size, facts.st_mtime_ns, owner
                        )
                    )
    except (FileNotFoundError, NotADirectoryError):
        return []
    return found


class FilesRoot:
    """The directory of one store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespaces = directory / "namespaces"
        self.writers = directory / "writers"
        self.sweeper = directory / "sweeper"
        self.usage = directory / "usage.json"

    def prepare(self) -> None:
        """Make the directory a store, or see that it is one. Raises StoreError."""
        make_directory(self.directory)
        if not self._is_described():
            write_json(self.directory / "store.json", {"format": FORMAT, "kind": KIND})
        with as_store_error(self.directory):
            for place in (self.namespaces, self.writers, self.sweeper):
                place.mkdir(mode=0o700, exist_ok=True)

    def see_that_it_is_there(self) -> None:
        """Raises StoreError if the directory holds no store now. None is made: a directory that is
        empty may be one on which nothing is mounted."""
        if not self._is_described():
            raise StoreError(f"{self.directory} is gone; mount it, or bring it back")

    def _is_described(self) -> bool:
        path = self.directory / "store.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.get("kind") != KIND:
            slab = isinstance(content, dict) and "directories" in content
            raise StoreError(
                f"{path} describes {'a slab store' if slab else 'no files store'}; "
                "name another directory for files://"
            )
        if content.get("format") != FORMAT:
            raise StoreFormatError(
                f"{self.directory} holds a store of format {content.get('format')}, this version "
                f"reads {FORMAT}; upgrade hicache-nixl or use another directory"
            )
        return True

    def remove_drafts(self, before_ns: int) -> None:
        """Remove what was left of files that were being written whole before that time."""
        for place in (self.directory, *self._places()):
            for name in names_in(place):
                path = place / name
                if _DRAFT.fullmatch(name) and path.lstat().st_mtime_ns < before_ns:
                    path.unlink()

    # -- namespaces -----------------------------------------------------------------------------

    def namespace_directory(self, digest: bytes) -> Path:
        return self.namespaces / digest.hex()

    def note_namespace(self, namespace: Namespace) -> None:
        """Make the directory of a namespace, with its manifest. Raises StoreError."""
        place = self.namespace_directory(namespace.digest)
        with as_store_error(place):
            place.mkdir(mode=0o700, exist_ok=True)
        if _read_manifest(place / "manifest.json") is None:
            write_json(place / "manifest.json", namespace.manifest)

    def noted_namespaces(self) -> list[Namespace]:
        """The namespaces whose manifest is there and right. Raises StoreError."""
        manifests = (_read_manifest(place / "manifest.json") for place in self._places())
        return [namespace for namespace in manifests if namespace is not None]

    def _places(self) -> list[Path]:
        with as_store_error(self.namespaces):
            names = sorted(names_in(self.namespaces))
        return [self.namespaces / name for name in names if _HEX_NAME.fullmatch(name)]

    def leaves(self, first: str, namespace: bytes | None = None) -> list[str]:
        """Directories of pages whose keys start with `first`, of one namespace or of all.

        OSError where they cannot be read.
        """
        places = [self.namespace_directory(namespace)] if namespace else self._places()
        found = []
        for place in places:
            above = f"{place}/{first}"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found += [f"{above}/{n}" for n in sorted(names_in(above)) if n in _FAN_OUT]
        return found

    def pages(self, namespace: Namespace) -> Iterator[Entry]:
        """Every page of a namespace, of whatever size. OSError where they cannot be read."""
        for first in FAN_OUT:
            for leaf in self.leaves(first, namespace.digest):
                for entry in entries_of(leaf):
                    if entry.owner is None:
                        yield entry


def _read_manifest(path: Path) -> Namespace | None:
    """The namespace of a manifest; None if it is not there or is not right."""
    try:
        namespace = namespace_from_manifest(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (*UNREADABLE, HiCacheNixlError) as error:
        logger.warning("%s cannot be used: %s", path, error)
        return None
    if namespace.digest.hex() != path.parent.name:
        logger.warning("%s is the manifest of another namespace", path)
        return None
    return namespace
