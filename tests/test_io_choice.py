"""Choosing plug-in and queue for a store in directories: what is tried, and what falls back."""

from pathlib import Path
from typing import Any

import pytest

from hicache_nixl import io_choice
from hicache_nixl.errors import SettingsError, TransferError
from hicache_nixl.settings import Settings, load_settings


def settings(directory: Path, **changes: Any) -> Settings:
    """Settings of a small store in `directory`."""
    values = {"store": f"slab://{directory}", "capacity": "32MiB", "staging": "1MiB"}
    return load_settings(values | changes, environ={})


def test_probe_files_do_not_stay(tmp_path: Path) -> None:
    """Trying O_DIRECT and the queue leaves no file behind."""
    io_choice.choose_io(settings(tmp_path), [tmp_path])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("queue", ["aio", "uring"])
def test_queue_can_be_chosen(tmp_path: Path, queue: str) -> None:
    """The queue of the settings is the one in use, where it works."""
    choice = io_choice.choose_io(settings(tmp_path, queue=queue), [tmp_path])
    assert choice.queue == queue or any("io_uring" in note for note in choice.notes)


def test_refused_uring_falls_back_to_aio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where io_uring fails, AIO serves, with one note that says why."""
    real = io_choice._try

    def refuse(plugin: str, parameters: dict[str, str], *rest: Any) -> None:
        if "use_uring" in parameters:
            raise TransferError("io_uring_queue_init: Operation not permitted")
        real(plugin, parameters, *rest)

    monkeypatch.setattr(io_choice, "_try", refuse)
    choice = io_choice.choose_io(settings(tmp_path), [tmp_path])
    assert choice.queue == "aio"
    assert [note for note in choice.notes if "Operation not permitted" in note]


def test_no_working_queue_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither queue works, starting fails in one line that names the directory."""

    def refuse(*_: Any) -> None:
        raise TransferError("not here")

    monkeypatch.setattr(io_choice, "_try", refuse)
    with pytest.raises(TransferError, match=str(tmp_path)):
        io_choice.choose_io(settings(tmp_path), [tmp_path])


def test_unloadable_plugin_is_refused_by_name(tmp_path: Path) -> None:
    """A plug-in that was asked for and cannot be loaded stops the start and says why."""
    with pytest.raises(SettingsError, match="gds_mt"):
        io_choice.choose_io(settings(tmp_path, plugin="gds_mt"), [tmp_path])
