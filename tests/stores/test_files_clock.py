"""The file system's clock."""

import os
import time
from pathlib import Path

import pytest

from hicache_nixl.stores.files_clock import FileClock


def test_time_is_that_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on from the last observation, whatever the wall clock says."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    clock = FileClock()
    path = tmp_path / "file"
    for years in (0, -5, 5):
        path.touch()
        mtime_ns = path.stat().st_mtime_ns + years * 31_557_600 * 10**9
        os.utime(path, ns=(mtime_ns, mtime_ns))
        clock.observe(path.stat().st_mtime_ns)
        first, second = clock.now_ns(), clock.now_ns()
        assert mtime_ns <= first <= second < mtime_ns + 10**10
