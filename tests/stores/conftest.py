"""Fixtures for store tests: a directory for a store, and a small file system of its own."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a store goes; its parent exists."""
    return tmp_path / "store"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes an ext4 file system of some MiB, on a loop device; skips where that is not allowed."""
    with ExitStack() as cleanup:

        def make(mib: int) -> Path:
            if os.geteuid() != 0:
                pytest.skip("only root may mount a loop device")
            image, place = tmp_path / f"disk-{mib}.img", tmp_path / f"disk-{mib}"
            place.mkdir()
            with image.open("wb") as file:
                file.truncate(mib << 20)
            try:
                subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
                subprocess.run(["mount", "-o", "loop", image, place], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no loop device with ext4 here: {error}")
            cleanup.callback(subprocess.run, ["umount", "-l", place], check=True)
            return place

        yield make


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory nobody can write to, root neither; skips where it cannot be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a read-only file system")
    place = tmp_path / "read-only"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", place], check=False
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
