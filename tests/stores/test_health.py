"""How stores tell whether they work, and what they do when their directory goes and comes back."""

import errno
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from filestores import open_plain_files, wait_for_a_round, wait_until
from hicache_nixl.errors import RegistrationError, StoreError
from hicache_nixl.identity import Namespace
from hicache_nixl.stores import directory as directory_module
from hicache_nixl.stores.slab_opening import SlabOpening
from slabs import KIB, Tenant, chain_keys, check_slots, namespace, open_files, open_plain

KINDS = pytest.mark.parametrize("kind", ["slab", "files"])
DIRECTIONS = pytest.mark.parametrize("direction", ["read", "write"])


def opened(kind: str, root: Path, **how: Any) -> Any:
    return (open_plain if kind == "slab" else open_plain_files)(root, **how)


def check(tenant: Tenant, direction: Any) -> None:
    tenant.store.check(direction, deadline=time.monotonic() + 30)


def settle(tenant: Tenant, kind: str) -> None:
    """Let the store look at its directory with the next call."""
    if kind == "slab":
        tenant.store._next_look = 0.0
    else:
        tenant.store._spaces[tenant.namespace.digest].next_look = 0.0


@KINDS
@DIRECTIONS
@pytest.mark.parametrize("pages", [0, 8], ids=["empty", "with pages"])
def test_a_store_that_works(root: Path, kind: str, direction: str, pages: int) -> None:
    """A check passes, leaves nothing behind and changes no page."""
    keys = chain_keys("a", 8)
    with opened(kind, root) as tenant:
        if pages:
            tenant.put(keys)
    quiet = {} if kind == "slab" else {"keeps_house": False}  # the house adds files of its own
    with opened(kind, root, **quiet) as tenant:
        before = sorted(root.rglob("*"))
        for _ in range(3):
            check(tenant, direction)
        assert [path for path in root.rglob("*") if "check" in path.name] == []
        assert len(sorted(root.rglob("*"))) == len(before)
        assert tenant.exists(keys) == pages


@KINDS
@DIRECTIONS
@pytest.mark.parametrize(
    ("what", "code"), [("open", errno.EACCES), ("preadv", errno.EIO), ("open", errno.EROFS)]
)
def test_a_medium_that_fails(
    root: Path,
    kind: str,
    direction: str,
    what: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check fails for lost permission, I/O errors and a read-only medium, and passes again."""

    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with opened(kind, root) as tenant:
        tenant.put(chain_keys("a", 4))
        with monkeypatch.context() as patch:
            patch.setattr(directory_module.os, what, fail)
            with pytest.raises(StoreError, match=os.strerror(code)):
                check(tenant, direction)
        check(tenant, direction)


@KINDS
@pytest.mark.parametrize("what", ["open", "pwritev"])
def test_a_full_medium_is_well(
    root: Path, kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is no room is no reason not to try: pages that are there can be replaced."""

    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(kind, root) as tenant:
        monkeypatch.setattr(directory_module.os, what, fail)
        check(tenant, "write")


@DIRECTIONS
def test_an_index_that_fails(root: Path, direction: str) -> None:
    """A slab store without a working index does not work."""
    with open_plain(root) as tenant:
        tenant.store._opening.index.close()
        with pytest.raises(StoreError, match="is closed"):
            check(tenant, direction)


def test_an_index_that_is_busy(root: Path) -> None:
    """Reading works while another process holds the index, writing does not by the deadline."""
    with open_plain(root) as tenant, closing(sqlite3.connect(root / "index.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        check(tenant, "read")
        with pytest.raises(StoreError, match="locked"):
            tenant.store.check("write", deadline=time.monotonic() + 0.1)
        other.rollback()
        check(tenant, "write")


def test_one_directory_of_several_is_enough(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A striped store with a disk that fails still has pages on the others."""
    places = [root, root.with_name("second")]
    failing: list[Path] = []
    real = os.open

    def fail(path: Any, *arguments: Any, **named: Any) -> Any:
        if any(place in (path, path.parent) for place in failing):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *arguments, **named)

    with open_plain(places) as tenant:
        monkeypatch.setattr(directory_module.os, "open", fail)
        for one in places:
            failing[:] = [one]
            check(tenant, "read")
            check(tenant, "write")
        failing[:] = places
        with pytest.raises(StoreError, match=r"Input/output error; .*second: Input/output error"):
            check(tenant, "write")


@DIRECTIONS
def test_every_directory_is_tried(
    root: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer holds up the check, as it would every call."""
    places = [root, root.with_name("second")]
    tried: set[Path] = set()
    real = os.open

    def note(path: Path, *arguments: Any, **named: Any) -> Any:
        tried.update(place for place in places if place in (path, path.parent))
        return real(path, *arguments, **named)

    with open_plain(places) as tenant:
        monkeypatch.setattr(directory_module.os, "open", note)
        check(tenant, direction)
    assert tried == set(places)


@KINDS
def test_a_medium_without_nameless_files(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file needs a name, as on NFS, a check gives it one and takes it away again."""
    real = os.open
    named: list[str] = []

    def refuse(path: Path, flags: int, *arguments: Any, **more: Any) -> Any:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if ".check-" in str(path):
            named.append(str(path))
        return real(path, flags, *arguments, **more)

    with opened(kind, root) as tenant:
        monkeypatch.setattr(directory_module.os, "open", refuse)
        check(tenant, "write")
    assert len(named) == 1
    assert not list(root.rglob(".check-*"))


def test_coming_back_half_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt to open the directories again that fails leaves nothing open."""
    keys = chain_keys("a", 8)
    with open_plain(root) as tenant:
        tenant.put(keys)
        root.rename(root.with_name("away"))
        settle(tenant, "slab")
        with pytest.raises(StoreError, match="is gone"):
            tenant.exists(keys)
        root.with_name("away").rename(root)

        def fail(*arguments: object) -> None:
            raise StoreError("the index is busy")

        with monkeypatch.context() as patch:
            patch.setattr(SlabOpening, "add_namespace", fail)
            for _ in range(3):
                with pytest.raises(StoreError, match="busy"):
                    check(tenant, "read")
        assert open_files(str(root)) == 0
        assert not list((root / "writers").iterdir())
        check(tenant, "read")
        assert all(tenant.get(keys))


@pytest.mark.parametrize("fails", [False, True])
def test_namespace_that_is_opened_while_the_directory_comes_back(
    root: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known in the new opening too, unless it could not be opened."""
    other = namespace(4 * KIB, "other")
    with open_plain(root) as tenant:
        first, add = tenant.store._opening, SlabOpening.add_namespace

        def add_and_go(opening: SlabOpening, space: Namespace) -> None:
            if opening is first and fails:
                raise StoreError("the index is busy")
            add(opening, space)
            if opening is first:
                tenant.store._let_go(first)
                check(tenant, "read")

        monkeypatch.setattr(SlabOpening, "add_namespace", add_and_go)
        if fails:
            with pytest.raises(StoreError, match="busy"):
                tenant.store.open_namespace(other)
            with pytest.raises(RegistrationError, match="is not open"):
                tenant.store.exists(other.digest, chain_keys("a", 1))
            tenant.store._let_go(first)
            check(tenant, "read")
            with pytest.raises(RegistrationError, match="is not open"):
                tenant.store.exists(other.digest, chain_keys("a", 1))
        else:
            tenant.store.open_namespace(other)
            assert tenant.store._opening is not first
            assert tenant.store.exists(other.digest, chain_keys("a", 1)) == 0


@KINDS
@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_directory_that_goes_and_comes_back(root: Path, kind: str, how: str) -> None:
    """Every call fails while it is away, nothing is put into files without a name, and nothing of
    it is held open; when it is back, itself or as a copy, so are its pages."""
    keys, away = chain_keys("a", 20), root.with_name("away")
    with opened(kind, root) as tenant:
        assert all(tenant.put(keys))
        descriptors = open_files(str(root))
        root.rename(away)
        settle(tenant, kind)
        for call in (tenant.exists, tenant.get, tenant.put, tenant.exists):
            with pytest.raises(StoreError, match="is gone; mount it, or bring it back"):
                call(keys)
        for direction in ("read", "write"):
            with pytest.raises(StoreError, match="bring it back"):
                check(tenant, direction)
        if kind == "files":
            wait_for_a_round(tenant)  # one that began before could go on in the empty place
        wait_until(lambda: open_files(str(away)) == 0)
        root.mkdir()  # an empty place is no store: something may be mounted there later
        with pytest.raises(StoreError, match="bring it back"):
            check(tenant, "write")
        assert list(root.iterdir()) == []
        root.rmdir()
        away.rename(root) if how == "moved" else shutil.copytree(away, root)
        check(tenant, "read")
        assert all(tenant.get(keys))
        assert all(tenant.put(chain_keys("b", 20)))
        assert all(tenant.get(chain_keys("b", 20)))
        wait_until(lambda: abs(open_files(str(root)) - descriptors) <= 1)
        if kind == "slab":
            assert check_slots(root).claimed == 0
    with opened(kind, root) as tenant:
        assert all(tenant.get(keys))


def test_another_store_in_its_place(root: Path) -> None:
    """What is not the store that was opened is not taken for it."""
    keys = chain_keys("a", 4)
    with open_plain(root) as tenant:
        tenant.put(keys)
        root.rename(root.with_name("away"))
        with open_plain(root) as other:
            other.put(chain_keys("b", 4))
        settle(tenant, "slab")
        with pytest.raises(StoreError, match="is gone"):
            tenant.put(keys)
        with pytest.raises(StoreError, match="does not hold the store that was opened there"):
            check(tenant, "write")
        with pytest.raises(StoreError, match="is gone"):
            tenant.get(keys)


def test_an_index_that_was_deleted(root: Path) -> None:
    """It is made again from the slots, without a restart."""
    keys = chain_keys("a", 10)
    with open_plain(root) as tenant:
        tenant.put(keys)
        for path in root.glob("index.sqlite*"):
            path.unlink()
        settle(tenant, "slab")
        with pytest.raises(StoreError, match="is gone"):
            tenant.exists(keys)
        check(tenant, "read")
        assert all(tenant.get(keys))


@KINDS
def test_closing_while_the_directory_is_away(root: Path, kind: str) -> None:
    """Closing does not raise, and lets go of everything."""
    with opened(kind, root) as tenant:
        tenant.put(chain_keys("a", 4))
        root.rename(root.with_name("away"))
        settle(tenant, kind)
        with pytest.raises(StoreError, match="is gone"):
            tenant.exists(chain_keys("a", 4))
    assert open_files(str(root)) == open_files(str(root.with_name("away"))) == 0


@KINDS
def test_clear_within_a_deadline(root: Path, kind: str) -> None:
    """Clearing that takes too long says what it did; the next call goes on from there."""
    with opened(kind, root, pages=512) as tenant:
        for number in range(3):
            assert all(tenant.put(chain_keys(number, 512)))
        with pytest.raises(StoreError, match=r"clear again|does not answer"):
            tenant.store.clear(tenant.namespace.digest, deadline=time.monotonic())
        left = sum(
            tenant.store.present(tenant.namespace.digest, chain_keys(n, 512)).sum()
            for n in range(3)
        )
        deadline = time.monotonic() + 60
        assert tenant.store.clear(tenant.namespace.digest, deadline=deadline) == left
        assert tenant.exists(chain_keys(0, 512)) == 0
