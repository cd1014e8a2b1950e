"""Putting a tier together: what is tried, what falls back, what is refused."""

import gc
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_nixl import io_choice, startup
from hicache_nixl.errors import SettingsError, StoreError, TransferError
from hicache_nixl.io_choice import IoChoice
from hicache_nixl.settings import Settings, load_settings
from hicache_nixl.stores import slab_segments
from hicache_nixl.stores.files import FilesStore
from hicache_nixl.transfer import QUEUE_PARAMETERS, TransferEngine


def settings(directory: Path, **changes: Any) -> Settings:
    """Settings of a small store in `directory`."""
    values = {"store": f"slab://{directory}", "capacity": "32MiB", "staging": "1MiB"}
    return load_settings(values | changes, environ={})


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_assembled_tier_works_and_releases_everything(tmp_path: Path) -> None:
    """A tier starts, and after close() holds no more descriptors than before and no staging."""
    startup.assemble(settings(tmp_path / "warm")).close()
    before = descriptors()
    tier = startup.assemble(settings(tmp_path / "store"))
    assert tier.choice.direct_io
    assert tier.choice.queue in ("uring", "aio")
    tier.close()
    tier.close()
    assert descriptors() <= before
    buffer = tier.buffer
    del tier
    gc.collect()
    assert not buffer.mapped
    assert [path.name for path in (tmp_path / "store").glob(".*")] == []


def test_refused_direct_io_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a directory refuses O_DIRECT, buffered I/O serves, with one note that names it."""
    monkeypatch.setattr(io_choice, "direct_io_refused", lambda directory: "Invalid argument")
    tier = startup.assemble(settings(tmp_path / "store"))
    try:
        assert not tier.choice.direct_io
        assert [n for n in tier.choice.notes if "O_DIRECT" in n and str(tmp_path) in n]
    finally:
        tier.close()


def test_uring_that_ends_after_its_trial_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where io_uring works on trial and has no ring left for the second engine, AIO serves with one
    warning, and nothing of the first engine is left."""
    opened: list[TransferEngine] = []

    def open_engine(plugin: str, parameters: dict[str, str]) -> TransferEngine:
        if parameters.items() >= QUEUE_PARAMETERS["uring"].items() and opened:
            raise TransferError("no ring left")
        # An AIO engine in any case: there may be no io_uring here.
        opened.append(TransferEngine(plugin, QUEUE_PARAMETERS["aio"]))
        return opened[-1]

    def choose(settings: Settings, directories: Sequence[Path]) -> IoChoice:
        return IoChoice("POSIX", "uring", QUEUE_PARAMETERS["uring"], direct_io=True)

    monkeypatch.setattr(startup, "choose_io", choose)
    monkeypatch.setattr(startup, "TransferEngine", open_engine)
    tier = startup.assemble(settings(tmp_path / "store"))
    try:
        assert tier.choice.queue == "aio"
        own = [r for r in caplog.records if r.name.startswith("hicache_nixl")]
        assert [r.message for r in own if r.levelname == "WARNING"] == [
            "io_uring does not work here (no ring left); using AIO"
        ]
        with pytest.raises(TransferError):
            opened[0].register_memory(tier.buffer.address, 4096)
    finally:
        tier.close()


def test_tmpfs_is_tried_for_real(tmp_path: Path) -> None:
    """On tmpfs the verdict on O_DIRECT is that of the kernel, and the tier works either way."""
    memory = Path("/dev/shm") / f"hicache-nixl-{os.getpid()}-{tmp_path.name}"
    memory.mkdir()
    try:
        refused = slab_segments.direct_io_refused(memory)
        tier = startup.assemble(settings(memory / "store"))
        assert tier.choice.direct_io == (refused is None)
        tier.close()
    finally:
        shutil.rmtree(memory)


def test_files_store_is_chosen_by_its_url(tmp_path: Path) -> None:
    """files:// opens a files store on the same engines, and releases everything."""
    startup.assemble(settings(tmp_path / "warm", store=f"files://{tmp_path / 'warm'}")).close()
    before = descriptors()
    threads = threading.active_count()
    tier = startup.assemble(settings(tmp_path / "x", store=f"files://{tmp_path / 'store'}"))
    assert isinstance(tier.store, FilesStore)
    assert (tmp_path / "store" / "namespaces").is_dir()
    tier.close()
    tier.close()
    assert descriptors() <= before
    assert threading.active_count() <= threads
    startup.assemble(settings(tmp_path / "slab")).close()
    with pytest.raises(StoreError, match="a slab store"):
        startup.assemble(settings(tmp_path / "x", store=f"files://{tmp_path / 'slab'}"))


@pytest.mark.parametrize("plugin", ["gds", "gds_mt", "3fs"])
def test_unloadable_plugin_is_refused_for_files(tmp_path: Path, plugin: str) -> None:
    """A plug-in that cannot be loaded here says why at start; the store is not touched by it."""
    where = f"files://{tmp_path / 'store'}"
    with pytest.raises(SettingsError, match=f"plugin='{plugin}' does not work here: .+"):
        startup.assemble(settings(tmp_path, store=where, plugin=plugin))
    assert [path.name for path in (tmp_path / "store").glob(".*")] == []


def test_missing_parent_is_refused(tmp_path: Path) -> None:
    """A directory whose parent does not exist is refused and nothing is made."""
    with pytest.raises(StoreError, match="does not exist"):
        startup.assemble(settings(tmp_path / "not" / "there"))
    assert list(tmp_path.iterdir()) == []
