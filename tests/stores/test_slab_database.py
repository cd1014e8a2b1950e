"""The database file: transactions, waiting, and what damage and trouble turn into."""

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from hicache_nixl.errors import StoreError
from hicache_nixl.stores import slab_database
from hicache_nixl.stores.slab_database import Database, IndexLostError, lost_mark
from slabs import open_files


def make(path: Path, busy_timeout_s: float = 5.0) -> Database:
    database = Database(path, busy_timeout_s=busy_timeout_s, page_size=1024)
    database.script("CREATE TABLE t(x INTEGER);")
    return database


def test_a_block_that_raises_is_rolled_back(tmp_path: Path) -> None:
    """All of a transaction or nothing."""
    with closing(make(tmp_path / "d")) as database:
        with pytest.raises(StoreError), database.writing() as connection:
            connection.executemany("INSERT INTO t VALUES(?)", [(1,), ()])
        with database.writing() as connection:
            connection.execute("INSERT INTO t VALUES(2)")
        assert database.rows("SELECT x FROM t") == [(2,)]


def test_reads_while_writing(tmp_path: Path) -> None:
    """A read does not wait for a transaction, nor see it before it is committed."""
    with closing(make(tmp_path / "d")) as database:
        with database.writing() as connection:
            connection.execute("INSERT INTO t VALUES(1)")
            assert database.rows("SELECT x FROM t") == []
        assert database.rows("SELECT x FROM t") == [(1,)]


def test_waiting_for_another_process_ends(tmp_path: Path) -> None:
    """A transaction waits for its deadline, not longer, then says that the index is busy."""
    with closing(make(tmp_path / "d")) as one, closing(make_again(tmp_path / "d")) as two:
        with one.writing() as connection:
            connection.execute("INSERT INTO t VALUES(1)")
            start = time.monotonic()
            with pytest.raises(StoreError, match="locked"), two.writing(start + 0.2):
                pass
            assert 0.15 < time.monotonic() - start < 10
        with two.writing(time.monotonic()) as connection:
            connection.execute("INSERT INTO t VALUES(2)")


def make_again(path: Path) -> Database:
    return Database(path, busy_timeout_s=0.1)


def test_waiting_for_another_thread_ends(tmp_path: Path) -> None:
    """The same for a thread of this process."""
    with closing(make(tmp_path / "d", 0.1)) as database:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with database.writing():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait()
        with pytest.raises(StoreError, match="busy"), database.writing():
            pass
        leave.set()
        thread.join()
        with database.writing():
            pass


def test_damage_is_told_apart_from_trouble(tmp_path: Path) -> None:
    """What is no database, or a damaged one, is lost and marked so; other errors are not."""
    path = tmp_path / "d"
    path.write_bytes(b"not a database, not at all, by no means " * 100)
    with pytest.raises(IndexLostError, match="start again"):
        Database(path, busy_timeout_s=1)
    assert lost_mark(path).exists()
    fresh = tmp_path / "e"
    with closing(make(fresh)) as database:
        with pytest.raises(StoreError, match="no such table") as caught:
            database.rows("SELECT * FROM missing")
        assert not isinstance(caught.value, IndexLostError)
    assert not lost_mark(fresh).exists()


def test_missing_file_is_not_created(tmp_path: Path) -> None:
    """Opening is not making."""
    with pytest.raises(StoreError, match="unable to open"):
        Database(tmp_path / "none", busy_timeout_s=1)
    assert not list(tmp_path.iterdir())


def test_awkward_paths(tmp_path: Path) -> None:
    """A directory name with characters that mean something in a URI."""
    directory = tmp_path / "a b?c=1#d%20é"
    directory.mkdir()
    with closing(make(directory / "d")):
        assert (directory / "d").exists()


def test_errors_are_one_line(tmp_path: Path) -> None:
    """Every message is one line that names the file."""
    with closing(make(tmp_path / "d")) as database:
        for statement in ("SELECT", "SELECT x\nFROM nowhere"):
            with pytest.raises(StoreError) as caught:
                database.rows(statement)
            assert "\n" not in str(caught.value)
            assert str(tmp_path / "d") in str(caught.value)


def test_closed_database(tmp_path: Path) -> None:
    """Closing waits for the writer, closes readers that are still out, and can be repeated."""
    database = make(tmp_path / "d")
    with database.writing():
        assert database.rows("SELECT x FROM t") == []  # makes a reader
    database.close()
    database.close()
    for use in (lambda: database.rows("SELECT x FROM t"), lambda: database.writing().__enter__()):
        with pytest.raises(StoreError, match="closed"):
            use()
    assert not list(tmp_path.glob("d-*")), "the last to close leaves no journal"
    with closing(sqlite3.connect(tmp_path / "d")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("what", ["transaction", "query"])
def test_closing_while_the_disk_does_not_answer(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing returns; what was under way may end, and nothing is open after it."""
    monkeypatch.setattr(slab_database, "_CLOSE_WAIT_S", 0.05)
    database = make(tmp_path / "d")
    entered, answer = threading.Event(), threading.Event()

    def hang() -> int:
        entered.set()
        answer.wait()
        return 7

    database._writer.create_function("hang", 0, hang)
    found: list[tuple[int]] = []

    def use() -> None:
        if what == "query":
            found.extend(database.rows("SELECT hang()"))
        else:
            with database.writing() as connection:
                connection.execute("INSERT INTO t SELECT hang()")

    thread = threading.Thread(target=use)
    thread.start()
    entered.wait()
    closer = threading.Thread(target=database.close)
    closer.start()
    try:
        closer.join(30)
        assert not closer.is_alive()
        assert thread.is_alive()
        with pytest.raises(StoreError, match="closed"):
            database.rows("SELECT x FROM t")
    finally:
        answer.set()
        thread.join()
        closer.join()
    assert open_files(str(tmp_path)) == 0
    if what == "transaction":
        with closing(Database(tmp_path / "d", busy_timeout_s=1)) as again:
            found = again.rows("SELECT x FROM t")
    assert found == [(7,)]
