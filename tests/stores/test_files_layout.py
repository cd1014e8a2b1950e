"""Names in a files store, and who wrote them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.files_layout import (
    FilesRoot,
    Owner,
    entries_of,
    page_path,
    temporary_path,
    this_host,
)
from slabs import KIB, key, namespace


def test_owner_is_told_by_its_name() -> None:
    """An owner's name says host, process and start, fits a file name and can be read back."""
    me = Owner.of_this_process()
    assert Owner.parse(str(me)) == me
    assert me.pid == os.getpid()
    assert str(me) != str(Owner.of_this_process())
    assert "/" not in str(me)
    for text in ("", "notes", "a.b.c", "a.b.c.d", "a.1.2", "a.1.2.3.4"):
        assert Owner.parse(text) is None


def test_host_is_unique_and_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host id starts with the host's name, whatever that is made of, and is the same again."""
    monkeypatch.setattr("socket.gethostname", lambda: "gpu.node/7" + "x" * 100)
    host = this_host()
    assert host == this_host()
    assert host.startswith("gpu-node-7")
    assert len(host) < 64
    assert "." not in host


def test_dead_processes_are_known_on_this_host_only() -> None:
    """A process that has ended, or whose number was reused, is dead; others may be alive."""
    me = Owner.of_this_process("here")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    other = Owner("here", child.pid, started, "0")
    assert not me.knows_dead(str(me))
    assert not me.knows_dead(str(other))
    assert me.knows_dead(str(replace(other, started=started + 1)))
    assert not me.knows_dead(str(replace(other, started=0))), "its start was not known"
    child.communicate()
    assert me.knows_dead(str(other))
    assert not me.knows_dead(str(replace(other, host="there")))
    assert not me.knows_dead("notes")


def test_entries_of_a_directory(root: Path) -> None:
    """A listing has pages and what is being written, in the right directory; nothing else."""
    page = key("a")
    me = Owner.of_this_process("here")
    leaf = root / Path(page_path(page)).parent
    leaf.mkdir(parents=True)
    (root / page_path(page)).write_bytes(bytes(5000))
    (root / temporary_path(page, me, 7)).write_bytes(bytes(9))
    name = page.hex()
    strangers = ("notes", f"{name}_k", name[:-1], name.upper() + "0", f".{name}.swp", "." + name)
    for stranger in (*strangers, ("f" if name[0] != "f" else "e") + name[1:]):
        (leaf / stranger).write_bytes(b"")
    found = {entry.owner: entry for entry in entries_of(str(leaf))}
    assert found.keys() == {None, str(me)}
    assert (found[None].key, found[None].nbytes) == (page, 5000)
    assert (found[str(me)].key, found[str(me)].nbytes) == (page, 9)
    assert entries_of(str(leaf / "nothing")) == []
    assert entries_of(str(leaf / "notes")) == []


def test_manifests(root: Path) -> None:
    """A namespace's manifest can be read; one that is damaged or of another place is passed over,
    and written anew when it is opened."""
    files = FilesRoot(root)
    files.prepare()
    one, two = namespace(4 * KIB, "one"), namespace(4 * KIB, "two")
    for space in (one, two, one):
        files.note_namespace(space)
    assert {space.digest for space in files.noted_namespaces()} == {one.digest, two.digest}
    first, second = (files.namespace_directory(s.digest) / "manifest.json" for s in (one, two))
    first.write_text("{")
    second.write_text("[]")
    assert files.noted_namespaces() == []
    files.note_namespace(one)
    second.write_bytes(first.read_bytes())
    assert [space.digest for space in files.noted_namespaces()] == [one.digest]


def test_preparing_twice_changes_nothing(root: Path) -> None:
    """Opening a store again, also by another version of this process, leaves it as it is."""
    FilesRoot(root).prepare()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    FilesRoot(root).prepare()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_drafts_are_removed(root: Path) -> None:
    """What is left of a file that was being written, or of a check, is removed once it is old;
    nothing else is."""
    files = FilesRoot(root)
    files.prepare()
    space = namespace(4 * KIB)
    files.note_namespace(space)
    place = files.namespace_directory(space.digest)
    old = [
        root / ".usage.json.0123abcd",
        place / ".manifest.json.0123abcd",
        place / ".check-17-0123abcd",
    ]
    new = root / ".usage.json.0123abce"
    foreign = [root / ".usage.json.swp", root / "notes", root / ".check-in"]
    for path in (*old, new, *foreign):
        path.touch()
    for path in (*old, *foreign):
        os.utime(path, (1000, 1000))
    files.remove_drafts(2000 * 10**9)
    assert [path.exists() for path in (*old, new, *foreign)] == [False] * 3 + [True] * 4
    assert files.noted_namespaces() == [space]


def test_directory_that_is_a_file(root: Path) -> None:
    """A file in place of the directory is refused in one line."""
    root.write_text("")
    with pytest.raises(StoreError, match="no directory"):
        FilesRoot(root).prepare()
