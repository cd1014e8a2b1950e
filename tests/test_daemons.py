import threading

import pytest

from hicache_nixl.daemons import start_daemon


def test_it_runs() -> None:
    """The thread runs what it was given, under its name, and holds up no exit."""
    ran = threading.Event()
    thread = start_daemon(ran.set, "one")
    assert thread is not None
    assert ran.wait(20)
    assert (thread.name, thread.daemon) == ("one", True)


def test_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no thread left, that is an answer, not an error."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert start_daemon(lambda: None, "one") is None
