"""The files store through and through: real files, real transfers, damage, trouble, crashes."""

import errno
import gc
import json
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from filestores import (
    leftovers,
    open_files_tenant,
    open_plain_files,
    page_file,
    page_files,
    slow_calls,
    start_files_child,
    stored_bytes,
    wait_until,
)
from hicache_nixl.batch import Outcome, Outcomes
from hicache_nixl.errors import RegistrationError, StoreError, StoreFormatError, TransferError
from hicache_nixl.stores import files_crew, files_pages
from hicache_nixl.stores.files import FilesStore
from hicache_nixl.stores.slab import SlabStore
from slabs import (
    KIB,
    MIB,
    PlainMover,
    chain_keys,
    finish,
    in_threads,
    key,
    namespace,
    open_files,
    open_plain,
)

# -- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "segments", "aligned"),
    [
        (4 * KIB, 1, True),
        (64 * KIB, 16, True),
        (256 * KIB, 4, True),
        (2 * MIB, 32, True),
        (256 * KIB, 8, False),
        (3 * 1300, 3, True),
    ],
)
@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
def test_round_trip(
    root: Path, payload: int, segments: int, aligned: bool, direct_io: bool
) -> None:
    """Pages of any size, in place and staged, come back byte for byte, also after a reopening."""
    count = 24 if payload >= MIB else 100
    keys = chain_keys("a", count)
    how: dict[str, Any] = {
        "capacity": 128 * MIB,
        "payload": payload,
        "segments": segments,
        "aligned": aligned,
        "pages": count,
        "direct_io": direct_io,
    }
    with open_files_tenant(root, **how) as tenant:
        assert all(tenant.put(keys))
        assert tenant.exists(keys) == count
        assert all(tenant.get(keys))
    with open_files_tenant(root, host="another", **how) as tenant:
        assert tenant.exists(keys) == count
        assert all(tenant.get(keys))
    assert {path.stat().st_size for path in page_files(root)} == {tenant.record_bytes}
    assert not leftovers(root)


def test_more_pages_than_staging(root: Path) -> None:
    """200 pages in one call through staging for 8 of them come back byte for byte."""
    keys = chain_keys("a", 200)
    how: dict[str, Any] = {"payload": 120 * KIB, "aligned": False, "pages": 200, "staging": MIB}
    with open_files_tenant(root, **how) as tenant:
        assert tenant.mover.staging.nbytes // tenant.record_bytes == 8
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_trailer_checks_alone(root: Path) -> None:
    """Without payload checksums, pages come back as well."""
    keys = chain_keys("a", 50)
    with open_files_tenant(root, checks_payload=False) as tenant:
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_stored_pages_are_not_written_again(root: Path) -> None:
    """A put of stored and new pages says True for all and makes files for the new ones only."""
    keys = chain_keys("a", 40)
    with open_plain_files(root) as tenant:
        assert all(tenant.put(keys[:30]))
        before = {path: path.stat().st_ino for path in page_files(root)}
        assert all(tenant.put(keys))
        after = {path: path.stat().st_ino for path in page_files(root)}
        assert before.items() < after.items()
        assert len(after) == 40


def test_key_named_twice(root: Path) -> None:
    """A call that names a key twice stores it once, and reads it into both pages."""
    one, two = chain_keys("a", 2)
    with open_files_tenant(root) as tenant:
        assert tenant.put([one, two, one]) == [True] * 3
        assert len(page_files(root)) == 2
        assert tenant.get([one, one, two]) == [True] * 3


def test_get_reads_the_leading_run(root: Path) -> None:
    """Pages behind the first missing one are not read, also beyond one part of the call."""
    keys = chain_keys("a", 300)
    with open_files_tenant(root, pages=300) as tenant:
        tenant.put(keys[:4])
        tenant.put(keys[6:])
        assert tenant.get(keys) == [True] * 4 + [False] * 296
        tenant.put(keys[4:6])
        page_file(root, keys[200]).unlink()
        assert tenant.get(keys) == [True] * 200 + [False] * 100
        assert tenant.get([]) == []
        assert tenant.put([]) == []


def test_exists_stops_at_the_first_gap(root: Path) -> None:
    """Of 512 pages without page 200, 200 exist; on a fast and on a slow file system."""
    keys = chain_keys("aaaa", 512)
    with open_plain_files(root, pages=512) as tenant:
        tenant.put(keys[:200])
        tenant.put(keys[201:])
        for seconds in (0, 0.001):
            with slow_calls(seconds):
                assert tenant.exists(keys) == 200
                assert tenant.exists(keys[:200]) == 200
                assert tenant.exists(keys[200:]) == 0
                assert tenant.exists(keys[201:]) == 311
                assert tenant.exists([]) == 0
                present = tenant.store.present(tenant.namespace.digest, keys)
                assert present.tolist() == [i != 200 for i in range(512)]
        assert tenant.store.present(tenant.namespace.digest, []).shape == (0,)


def test_exists_looks_at_few_pages_behind_the_first_gap(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absent prefix costs a few calls of the file system, not one for each key."""
    calls: list[str] = []
    real = files_pages.stat_page
    monkeypatch.setattr(files_crew, "_SLOW_CALL_S", 10.0)

    def stat_page(path: str, directory: int) -> os.stat_result:
        calls.append(path)
        return real(path, directory)

    monkeypatch.setattr(files_pages, "stat_page", stat_page)
    with open_plain_files(root) as tenant:
        assert tenant.exists(chain_keys("absent", 512)) == 0
    assert len(calls) <= 64


def test_namespaces_do_not_share_pages(root: Path) -> None:
    """The same key under another identity is another page, and clearing one leaves the others."""
    keys = chain_keys("a", 20)
    with (
        open_plain_files(root, model="one") as one,
        open_plain_files(root, model="two") as two,
        open_plain_files(root, model="three", payload=16 * KIB) as three,
    ):
        assert all(one.put(keys))
        assert two.exists(keys) == three.exists(keys) == 0
        assert all(two.put(keys[:10]))
        assert all(three.put(keys[:15]))
        assert (one.exists(keys), two.exists(keys), three.exists(keys)) == (20, 10, 15)
        used = {use.namespace.manifest["model_name"]: use for use in one.store.namespaces()}
        pages = {name: use.pages for name, use in used.items()}
        assert pages == {"one": 20, "two": 10, "three": 15}
        assert used["three"].record_bytes == 15 * 20 * KIB
        assert 0 < used["one"].oldest_use_ns <= used["one"].newest_use_ns
        assert one.store.clear(one.namespace.digest) == 20
        assert one.store.clear(bytes(32)) == 0
        assert (one.exists(keys), two.exists(keys), three.exists(keys)) == (0, 10, 15)
        assert all(two.get(keys[:10]))
        assert all(three.get(keys[:15]))
        assert all(one.put(keys))
        assert all(one.get(keys))


def test_wrong_use(root: Path) -> None:
    """A namespace that was not opened, and a page as large as the budget, are said in one line."""
    with open_plain_files(root) as tenant:
        with pytest.raises(RegistrationError, match="open_namespace first"):
            tenant.store.exists(namespace(4 * KIB, "other").digest, [key(1)])
        with pytest.raises(RegistrationError, match="raise capacity"):
            tenant.store.open_namespace(namespace(64 * MIB))


def test_verify_removes_what_is_damaged(root: Path) -> None:
    """verify reads every page once, of one namespace or all, and forgets the damaged ones."""
    keys = chain_keys("a", 20)
    with open_plain_files(root) as tenant, open_plain_files(root, model="two") as two:
        tenant.put(keys)
        two.put(keys[:5])
        (path,) = (root / "namespaces" / tenant.namespace.digest.hex()).rglob(keys[7].hex())
        damage(path, "payload bit")
        checked = list(tenant.store.verify(tenant.namespace.digest))
        assert sorted(page.key for page in checked) == sorted(keys)
        assert [page.key for page in checked if not page.good] == [keys[7]]
        assert len(list(tenant.store.verify())) == 24
        assert tenant.exists(keys) == 7


# -- damage ------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    """Change the record of one page behind the store's back."""
    content = bytearray(path.read_bytes())
    if how == "payload bit":
        content[5] ^= 1
    elif how == "trailer bit":
        content[-4096 + 70] ^= 1
    elif how == "empty":
        content.clear()
    elif how == "half":
        del content[len(content) // 2 :]
    elif how == "longer":
        content += bytes(4096)
    elif how == "zeros":
        content[:] = bytes(len(content))
    elif how == "another page":
        content[:] = next(p for p in page_files(path.parents[4]) if p != path).read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "link":
        path.symlink_to("/dev/zero")
    elif how != "missing":
        path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "payload bit",
        "trailer bit",
        "empty",
        "half",
        "longer",
        "zeros",
        "another page",
        "missing",
        "directory",
        "link",
    ],
)
@pytest.mark.parametrize("plain", [False, True], ids=["nixl", "plain"])
def test_damaged_page_is_a_miss(root: Path, how: str, plain: bool) -> None:
    """A page that is not what was written is not read, no other one is wrong, and it is gone."""
    keys = chain_keys("a", 128)
    open_tenant = open_plain_files if plain else open_files_tenant
    with open_tenant(root, payload=8 * KIB) as tenant:
        tenant.put(keys)
        path = page_file(root, keys[3])
        damage(path, how)
        assert tenant.get(keys)[:4] == [True] * 3 + [False]
        assert tenant.exists(keys) == 3
        if how in ("directory", "link"):  # not ours, but in our place
            assert not any(tenant.put(keys)[3:4]) or how == "link"
            path.rmdir() if path.is_dir() else None
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_a_page_that_was_replaced_is_not_removed(root: Path) -> None:
    """A damaged page is removed only while it is still that file."""
    keys = chain_keys("a", 3)
    with open_plain_files(root) as tenant:
        tenant.put(keys)
        path = page_file(root, keys[1])
        right = path.read_bytes()
        damage(path, "payload bit")

        class Raced(PlainMover):
            def read(self, *arguments: Any, **named: Any) -> Outcomes:
                outcomes = super().read(*arguments, **named)
                fresh = path.with_name("fresh")
                fresh.write_bytes(right)
                fresh.rename(path)
                return outcomes

        tenant.mover = Raced()
        assert tenant.get(keys) == [True, False, True]
        tenant.mover = PlainMover()
        assert all(tenant.get(keys))


# -- transfers that fail or are late -----------------------------------------------------------


class TroubledMover(PlainMover):
    """Fails, or leaves late, the rows that a test names."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.late: set[int] = set()
        self.raises: Exception | None = None
        self.ended: list[Callable[[], None]] = []

    def _trouble(self, outcomes: Outcomes, on_late: Any, late: Outcome) -> Outcomes:
        for row in self.failing:
            outcomes[row] = Outcome.FAILED
        if self.late:
            self.ended.append(on_late(np.array(sorted(self.late))))
            outcomes[sorted(self.late)] = late
        if self.raises:
            raise self.raises
        return outcomes

    def write(self, *arguments: Any, **named: Any) -> Outcomes:
        return self._trouble(super().write(*arguments, **named), named["on_late"], Outcome.LATE)

    def read(self, *arguments: Any, **named: Any) -> Outcomes:
        return self._trouble(super().read(*arguments, **named), named["on_late"], Outcome.FAILED)


def test_late_writes_are_never_published(root: Path) -> None:
    """A file whose write is late stays open under its other name, and goes when it has ended."""
    keys = chain_keys("a", 10)
    with open_plain_files(root) as tenant:
        mover = tenant.mover = TroubledMover()
        before = open_files(".")
        mover.late = {2, 5}
        assert tenant.put(keys) == [i not in (2, 5) for i in range(10)]
        assert len(leftovers(root)) == 2
        wait_until(lambda: open_files("namespaces") == open_files("namespaces/"))
        assert open_drafts() == 2
        mover.late = set()
        assert all(tenant.put(keys))
        mover.late = {0}
        assert tenant.put(chain_keys("b", 1)) == [False]
    assert len(leftovers(root)) == 3
    for end in mover.ended:
        end()
    assert not leftovers(root)
    assert open_files(str(root)) == 0
    assert open_files(".") <= before


def links() -> list[Path]:
    """What the descriptors of this process are of."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(link.readlink())
        except FileNotFoundError:
            continue
    return found


def open_drafts() -> int:
    """Descriptors of this process on pages that are not whole yet."""
    return sum("namespaces" in link.parts and link.name.startswith(".") for link in links())


def test_late_reads_keep_their_files_open(root: Path) -> None:
    """A page that is removed under a late read stays open until the read has ended."""
    keys = chain_keys("a", 10)
    with open_plain_files(root) as tenant:
        mover = tenant.mover = TroubledMover()
        tenant.put(keys)
        mover.late = {1}
        assert tenant.get(keys) == [i != 1 for i in range(10)]
        assert tenant.exists(keys) == 10, "a read that is late says nothing of its page"
        page_file(root, keys[1]).unlink()
        assert sum(keys[1].hex() in str(link) for link in links()) == 1
    assert sum(keys[1].hex() in str(link) for link in links()) == 1
    mover.ended.pop()()
    assert open_files(str(root)) == 0


def test_failed_writes_leave_nothing(root: Path) -> None:
    """Each page has its own result; nothing is left of one that failed, and it can be retried."""
    keys = chain_keys("a", 10)
    with open_plain_files(root) as tenant:
        mover = tenant.mover = TroubledMover()
        mover.failing = {0, 9}
        assert tenant.put(keys) == [False] + [True] * 8 + [False]
        assert len(page_files(root)) == 8
        assert not leftovers(root)
        mover.failing, mover.raises, mover.late = set(), RuntimeError("broken"), {1}
        with pytest.raises(RuntimeError, match="broken"):
            tenant.put(chain_keys("b", 5))
        assert len(leftovers(root)) == 1
        mover.ended.pop()()
        assert not leftovers(root)
        mover.raises, mover.late = None, set()
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_failed_reads_are_forgotten_only_beside_good_ones(root: Path) -> None:
    """Pages are removed for what is wrong with them, not because storage fails as a whole."""
    keys = chain_keys("a", 10)
    with open_plain_files(root) as tenant:
        mover = tenant.mover = TroubledMover()
        tenant.put(keys)
        mover.failing = set(range(10))
        with pytest.raises(StoreError, match="10 pages cannot be moved"):
            tenant.get(keys)
        assert tenant.exists(keys) == 10
        mover.failing = {4}
        assert tenant.get(keys) == [i != 4 for i in range(10)]
        assert tenant.exists(keys) == 4


@pytest.mark.parametrize("call", ["register_file", "deregister"])
def test_engines_that_refuse_files(root: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be registered is a miss; one that is not let go of is never closed."""
    keys = chain_keys("a", 5)
    with open_files_tenant(root) as tenant:
        tenant.put(keys)
        reader = tenant.store._moves._reader
        real = getattr(reader, call)
        calls = iter(range(100))

        def refuse(*arguments: Any) -> Any:
            if next(calls) == 2:
                raise TransferError("not this one")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(reader, call, refuse)
            results = tenant.get(keys)
        still_open = sum(keys[2].hex() in str(link) for link in links())
        if call == "register_file":
            assert results == [True, True, False, True, True]
            assert still_open == 0
        else:
            assert all(results)
            assert still_open == 1
        assert tenant.exists(keys) == 5


# -- file systems in trouble -------------------------------------------------------------------


def test_calls_that_hang_cost_the_deadline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer costs the deadline; afterwards all is as before."""
    keys = chain_keys("a", 64)
    go_on = threading.Event()
    with open_plain_files(root, timeout_s=0.3) as tenant:
        free = tenant.store._descriptors._free
        tenant.put(keys)
        before = open_files(str(root))
        tenant.deadline_s = 0.3
        for name in ("stat", "open", "rename"):
            real = getattr(os, name)

            def hang(*arguments: Any, real: Any = real, **named: Any) -> Any:
                if threading.current_thread().name == "hicache-nixl-files":
                    go_on.wait()
                return real(*arguments, **named)

            go_on.clear()
            with monkeypatch.context() as patch:
                patch.setattr(files_pages.os, name, hang)
                start = time.monotonic()
                calls = {
                    "stat": [
                        lambda: tenant.exists(keys),
                        lambda: tenant.store.present(tenant.namespace.digest, keys),
                    ],
                    "open": [lambda: tenant.get(keys), lambda: tenant.put(chain_keys("b", 64))],
                    "rename": [lambda: tenant.put(chain_keys("c", 64))],
                }
                for call in calls[name]:
                    with pytest.raises(StoreError, match="does not answer in time"):
                        call()
                assert time.monotonic() - start < 10
                go_on.set()
            wait_until(lambda: open_files(str(root)) == before)
        wait_until(lambda: not leftovers(root))
        tenant.deadline_s = tenant.store._timeout_s = 30
        assert all(tenant.get(keys))
        assert all(tenant.put(chain_keys("d", 64)))
        assert tenant.store._descriptors._free == free


def test_full_disk(small_disk: Callable[[int], Path]) -> None:
    """Where 40 of 128 pages fit, 40 are stored and readable; nothing is left of the others."""
    disk = small_disk(40)
    root = disk / "store"
    keys = chain_keys("a", 128)
    how: dict[str, Any] = {"payload": 252 * KIB, "segments": 9, "capacity": 512 * MIB}
    with open_files_tenant(root, **how) as tenant:
        filler = disk / "filler"
        stat = os.statvfs(disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - 42 * 256 * KIB)
        results = tenant.put(keys)
        count = sum(results)
        assert 20 <= count <= 42
        assert tenant.exists(keys) == results.index(False)
        assert [tenant.get([page_key])[0] for page_key in keys] == results
        assert not leftovers(root)
        assert not any(tenant.put(chain_keys("b", 128))[10:])
        filler.unlink()
        results = tenant.put(keys)
        assert sum(results) > count + 20
        assert [tenant.get([page_key])[0] for page_key in keys] == results
        assert not leftovers(root)


@pytest.mark.parametrize("call", ["utime", "rename", "ftruncate", "mkdir"])
def test_a_failing_call_costs_its_page(
    root: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be made or put in place is not stored; the others are; nothing is left."""
    keys = chain_keys("a", 20)
    real = getattr(os, call)
    count = iter(range(100))

    def fail(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread().name == "hicache-nixl-files" and next(count) == 5:
            raise OSError(5, "Input/output error")
        return real(*arguments, **named)

    with open_plain_files(root) as tenant:
        tenant.store._spaces[tenant.namespace.digest]._reserves = False
        with monkeypatch.context() as patch:
            patch.setattr(files_pages.os, call, fail)
            assert sum(tenant.put(keys)) == 19
        assert not leftovers(root)
        assert len(page_files(root)) == 19
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_directories_removed_under_a_running_store(root: Path) -> None:
    """A namespace, or a part of it, that somebody deletes is made again by the next put."""
    keys = chain_keys("a", 20)
    with open_plain_files(root) as tenant:
        tenant.put(keys)
        place = root / "namespaces" / tenant.namespace.digest.hex()
        shutil.rmtree(place / keys[0].hex()[:2])
        assert tenant.exists(keys) == 0
        assert all(tenant.put(keys))
        shutil.rmtree(place)
        assert tenant.exists(keys) == 0
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))
        assert (place / "manifest.json").is_file()
        root.rename(root.with_name("away"))
        time.sleep(1.1)  # it is looked at each second
        for call in (tenant.exists, tenant.get, tenant.put):
            with pytest.raises(StoreError, match="is gone; mount it, or bring it back"):
                call(keys)
        root.with_name("away").rename(root)
        assert all(tenant.get(keys))


def test_read_only_directory(read_only_disk: Path, tmp_path: Path) -> None:
    """A directory nobody can write to is refused with what to do, and left as it is."""
    with pytest.raises(StoreError, match="writable"):
        FilesStore(read_only_disk, capacity_bytes=MIB)
    with pytest.raises(StoreError, match="Read-only"):
        FilesStore(read_only_disk / "store", capacity_bytes=MIB)
    with pytest.raises(StoreError, match="does not exist"):
        FilesStore(tmp_path / "not" / "there", capacity_bytes=MIB)


# -- what is not ours --------------------------------------------------------------------------


def test_what_is_not_ours_is_left_alone(root: Path) -> None:
    """The in-tree connector's files, and anybody's, stay through puts, clear, sweeps and verify."""
    root.mkdir()
    digest = namespace(4 * KIB).digest.hex()
    keys = chain_keys("a", 200)
    name = keys[0].hex()
    leaf = root / "namespaces" / digest / name[:2] / name[2:4]
    foreign = [
        root / "1a3" / f"{name}_org-model_0_1",
        root / "1a3" / f"{name}_org-model_0_1_k",
        root / "notes.txt",
        root / "namespaces" / "mine" / "ab" / "cd" / name,
        leaf / "notes.txt",
        leaf / f".{name}.swp",
        leaf / f"{'0' * 4 if not name.startswith('0000') else '1' * 4}{name[4:]}",
        leaf.parent / "notes",
        root / "writers" / "notes",
        root / "sweeper" / "notes",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (0, 0))
    with open_plain_files(root, capacity=100 * 8 * KIB) as tenant:
        for number in range(10):
            tenant.put(chain_keys(number, 50))
        wait_until(lambda: tenant.store.use().evicted_pages > 100)
        tenant.put(keys[:50])
        assert all(page.good for page in tenant.store.verify())
        tenant.store.clear(tenant.namespace.digest)
        assert not page_files_of_ours(root, digest, foreign)
    assert all(path.read_bytes() == b"x" * 100 for path in foreign)


def page_files_of_ours(root: Path, digest: str, foreign: list[Path]) -> list[Path]:
    return [path for path in page_files(root) if path not in foreign and digest in str(path)]


@pytest.mark.parametrize("what", ["pipe", "directory"])
def test_what_is_no_file_at_the_place_of_a_page(root: Path, what: str) -> None:
    """A pipe or a directory there is a miss at once, is not evicted, and clear goes past it."""
    with open_plain_files(root, capacity=256 * KIB, timeout_s=5.0) as one:
        keys = chain_keys("a", 4)
        assert all(one.put(keys))
        place = page_file(root, keys[1])
        place.unlink()
        os.mkfifo(place) if what == "pipe" else place.mkdir()
        os.utime(place, (1, 1))
        threads = threading.active_count()
        start = time.monotonic()
        assert one.get(keys)[:2] == [True, False]
        assert one.get(keys[2:]) == [True, True]
        assert time.monotonic() - start < 20
        for number in range(40):  # more than fits
            one.put(chain_keys(number, 4))
        wait_until(lambda: stored_bytes(root) <= 256 * KIB)
        assert one.store.clear(one.namespace.digest) > 0
        assert page_files(root) == ([place] if what == "directory" else [])
        assert threading.active_count() <= threads + 32


@pytest.mark.parametrize("what", ["link", "file for a directory", "forgotten", "forgotten later"])
def test_pages_that_are_none_are_no_trouble(
    root: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody put there, and a page that another host has removed, are misses."""
    (page_key,) = chain_keys("a", 1)
    with open_plain_files(root) as tenant:
        assert tenant.put([page_key]) == [True]
        place = page_file(root, page_key)
        if what == "link":
            place.rename(root / "aside")
            place.symlink_to(root / "aside")
        elif what == "file for a directory":
            shutil.rmtree(place.parent)
            place.parent.write_text("mine")
        else:
            call = "open" if what == "forgotten" else "fstat"
            real = getattr(os, call)

            def forget(where: Any, *arguments: Any, **named: Any) -> Any:
                path = Path(f"/proc/self/fd/{where}").readlink() if call == "fstat" else where
                if str(path).endswith(page_key.hex()):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                return real(where, *arguments, **named)

            monkeypatch.setattr(files_pages.os, call, forget)
        assert tenant.get([page_key]) == [False]
        if what == "file for a directory":
            assert tenant.exists([page_key]) == 0
            assert tenant.put([page_key]) == [False]
            assert place.parent.read_text() == "mine"
        elif what == "link":
            assert tenant.put([page_key]) == [True]
            assert tenant.get([page_key]) == [True]


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("sweeper/\u00b2", ""),
        ("writers/h.1.1.ad", '{"added": Infinity, "wanted": 0, "closed": false}'),
        ("writers/h.1.1.ad", "[" * 100_000),
        ("usage.json", '{"used_bytes": Infinity}'),
        ("usage.json", "[" * 100_000),
    ],
)
def test_damaged_small_files_stop_nothing(root: Path, place: str, content: str) -> None:
    """Nonsense in the files by which processes talk neither raises nor ends the housekeeping."""
    with open_plain_files(root, capacity=256 * KIB) as one:
        (root / place).write_text(content)
        for number in range(40):  # more than fits
            one.put(chain_keys(number, 4))
        wait_until(lambda: stored_bytes(root) <= 256 * KIB)
        wait_until(lambda: all(one.put(chain_keys("last", 4))))
    with open_plain_files(root, capacity=256 * KIB) as again:
        assert all(again.put(chain_keys("again", 4)))


def test_directories_of_another_kind_are_refused(root: Path, tmp_path: Path) -> None:
    """A slab store, an unknown description and a later format are refused; nothing is changed."""
    with open_plain(root):
        pass
    before = sorted(root.rglob("*"))
    with pytest.raises(StoreError, match=r"a slab store.*another directory"):
        FilesStore(root, capacity_bytes=MIB)
    assert sorted(root.rglob("*")) == before
    other = tmp_path / "other"
    other.mkdir()
    for content, error, words in (
        ("{}", StoreError, "no files store"),
        ("nonsense", StoreError, "no files store"),
        ('{"format": 2, "kind": "files"}', StoreFormatError, "format 2"),
    ):
        (other / "store.json").write_text(content)
        with pytest.raises(error, match=words):
            FilesStore(other, capacity_bytes=MIB)
        assert [path.name for path in other.iterdir()] == ["store.json"]
    third = tmp_path / "third"
    FilesStore(third, capacity_bytes=MIB, keeps_house=False).close()
    with pytest.raises(StoreError, match="describes a files store; name it by files://"):
        SlabStore([third], capacity_bytes=MIB)


# -- use ---------------------------------------------------------------------------------------


def test_closed_store(root: Path) -> None:
    """Closing is idempotent and ends threads; calls after it are a StoreError, change nothing."""
    keys = chain_keys("a", 3)
    with open_plain_files(root) as tenant:
        tenant.put(keys)
        tenant.store.close()
        tenant.store.close()
        assert open_files(str(root)) == 0
        assert not any("hicache-nixl-files" in thread.name for thread in threading.enumerate())
        for call in (tenant.get, tenant.put, tenant.exists):
            with pytest.raises(StoreError, match="closed"):
                call(keys)


@pytest.mark.parametrize("when", ["looked at", "opened", "found gone"])
def test_closed_while_its_directory_does_not_answer(
    root: Path, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that answers after the store was closed does not take the place of another file
    that has its number by now, and nothing of it stays open."""
    with open_plain_files(root) as tenant, (tmp_path / "other").open("w") as other:
        files = tenant.store._spaces[tenant.namespace.digest]
        number = files._directory
        place = root / "namespaces" / tenant.namespace.digest.hex()
        stat, open_directory = Path.stat, files._open_directory
        asked: list[Path] = []

        def close() -> None:
            files.close()
            os.dup2(other.fileno(), number)

        def stat_late(path: Path, **named: Any) -> os.stat_result:
            if path == place and path not in asked:
                asked.append(path)
                if when == "opened":
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory")
                close()
            return stat(path, **named)

        def open_late() -> int:
            descriptor = open_directory()
            close()
            return descriptor

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", stat_late)
            patch.setattr(files, "_open_directory", open_late)
            if when == "found gone":
                root.rename(root.with_name("away"))
                with pytest.raises(StoreError, match="is gone"):
                    files.follow()
                root.with_name("away").rename(root)
            else:
                files.follow()
        try:
            files._make_anew()
            files.close()
            assert os.path.samestat(os.fstat(number), os.fstat(other.fileno()))
            assert open_files(str(place)) == 0
        finally:
            os.close(number)


def test_closed_in_the_middle_of_a_put(root: Path) -> None:
    """Directories stay open until the last call is done, so that no other file is touched."""
    with open_plain_files(root) as tenant:

        class Slow(PlainMover):
            def write(self, *arguments: Any, **named: Any) -> Outcomes:
                outcomes = super().write(*arguments, **named)
                tenant.store.close()
                return outcomes

        tenant.mover = Slow()
        tenant.put(chain_keys("a", 5))
    assert open_files(str(root)) == 0
    assert not leftovers(root)
    with open_plain_files(root) as tenant:
        assert all(tenant.get(chain_keys("a", 5)))


def test_descriptors_do_not_leak(root: Path) -> None:
    """Opening, using and closing a store again and again leaves nothing open."""
    with open_plain_files(root):
        pass
    gc.collect()
    before = open_files()
    for number in range(5):
        with open_plain_files(root) as tenant:
            tenant.put(chain_keys(number, 128))
            tenant.get(chain_keys(number, 128))
        assert open_files() <= before


def test_open_files_are_bounded(root: Path) -> None:
    """A call of many pages, and several calls at once, stay within a number of descriptors."""
    most = 0
    with open_plain_files(root, pages=1200, capacity=256 * MIB) as tenant:
        tenant.store._descriptors._free = 100

        class Watching(PlainMover):
            def write(self, *arguments: Any, **named: Any) -> Outcomes:
                nonlocal most
                most = max(most, open_drafts())
                return super().write(*arguments, **named)

        tenant.get(chain_keys("absent", 400))
        assert tenant.store._descriptors._free == 100
        tenant.mover = Watching()
        in_threads(lambda n: tenant.put(chain_keys(n, 400), at=400 * n), range(3))
        assert 50 < most <= 100
        assert len(page_files(root)) == 1200
        assert tenant.store._descriptors._free == 100


def test_threads_put_and_get_the_same_keys(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two threads set and get the same keys, two others own ones: no error, no wrong byte, as many
    descriptors as before."""
    caplog.set_level(logging.WARNING)
    with open_files_tenant(root, pages=4 * 128, payload=16 * KIB) as tenant:

        def work(number: int) -> None:
            keys = chain_keys("same" if number < 2 else number, 128)
            for rounds in range(8):
                if (number + rounds) % 2:
                    tenant.get(keys, at=128 * number)
                else:
                    assert all(tenant.put(keys, at=128 * number))

        in_threads(work, range(4))
        before = open_files()
        in_threads(work, range(4))
        wait_until(lambda: open_files() <= before)
        assert all(tenant.get(chain_keys("same", 128)))
        assert len(page_files(root)) == 3 * 128
        assert not leftovers(root)
    assert not [record for record in caplog.records if record.name.startswith("hicache_nixl")]


# -- crashes -----------------------------------------------------------------------------------

PAGES = "hicache_nixl.stores.files_pages"


@pytest.mark.parametrize(
    ("point", "when"),
    [
        (f"{PAGES}:PageFiles._create", "after"),
        (f"{PAGES}:PageFiles._make_leaf", "after"),
        (f"{PAGES}:PageFiles._reserve", "after"),
        ("slabs:PlainMover.write", "before"),
        ("slabs:PlainMover.write", "after"),
        (f"{PAGES}:PageFiles.publish", "before"),
        (f"{PAGES}:PageFiles.publish", "after"),
        (f"{PAGES}:os.rename", "before"),
        (f"{PAGES}:os.rename", "after"),
    ],
)
def test_death_at_a_point(root: Path, point: str, when: str) -> None:
    """A process that dies while it puts leaves whole pages only, and its leftovers go."""
    with open_plain_files(root) as tenant:
        tenant.put(chain_keys("a", 20))
    finish(start_files_child("die", point, when, root, {}))
    with open_plain_files(root) as tenant:
        wait_until(lambda: not leftovers(root))
        assert all(tenant.get(chain_keys("a", 20)))
        assert tenant.readable(chain_keys("new", 32)) == len(page_files(root)) - 20
        assert all(page.good for page in tenant.store.verify())
        assert all(tenant.put(chain_keys("new", 32)))
        assert all(tenant.get(chain_keys("new", 32)))
        assert len(page_files(root)) == 52


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_while_putting(root: Path, seed: int) -> None:
    """SIGKILL at any instant: every page that is reported is right, leftovers are cleaned up."""
    chooser = random.Random(seed)
    how: dict[str, Any] = {"payload": 64 * KIB, "segments": 2, "capacity": 256 * MIB}
    told: list[tuple[Any, int]] = []
    for _ in range(2):
        child = start_files_child("put_for_ever", root, chooser.randrange(1 << 30), how)
        assert child.stdout is not None
        for _ in range(chooser.randrange(1, 15)):
            name, count, stored = json.loads(child.stdout.readline())
            told.append((tuple(name), stored))
        time.sleep(chooser.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:  # what it had said until then
            name, count, stored = json.loads(line)
            told.append((tuple(name), stored))
        child.wait()
    with open_files_tenant(root, **how) as tenant:
        for name, count in told:
            assert tenant.exists(chain_keys(name, count)) == count
            assert all(tenant.get(chain_keys(name, count)))
        assert all(page.good for page in tenant.store.verify())
        wait_until(lambda: not leftovers(root))
        assert stored_bytes(root) == len(page_files(root)) * tenant.record_bytes
