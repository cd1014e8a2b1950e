"""Configurations for tests of the settings, and what the file systems under them shall be."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hicache_nixl.errors import SettingsError
from hicache_nixl.file_systems import FileSystems
from hicache_nixl.settings import Settings, load_settings

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
STORE = "slab:///nvme0/hicache"
STORAGE_DIR = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
PLUGIN_VARIABLE = "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"
LOADER = {
    "backend_name": "hicache_nixl",
    "module_path": "hicache_nixl",
    "class_name": "HiCacheNixlConnector",
    "interface_v1": 1,
}
SECRET = "wJalrXUtnFEMI/K7MDENG"


def load(
    extra_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **changes: Any,
) -> Settings:
    """Settings over a store, from `extra_config` and no environment but `environ`."""
    return load_settings(
        {"store": STORE} | dict(extra_config or {}), environ=environ or {}, **changes
    )


def refusal(
    extra_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **changes: Any,
) -> str:
    """The message by which this configuration is refused: one line without pydantic's words."""
    with pytest.raises(SettingsError) as caught:
        load_settings(extra_config, environ=environ or {}, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    assert "input_value" not in message
    assert caught.value.__cause__ is None
    return message


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@dataclass
class Disks:
    """A mount table in a file, and the size and use of the disks.

    `kinds` maps mount points to file system types; "/" is ext4 unless it says otherwise.
    """

    table: Path
    kinds: Mapping[str, str] = field(default_factory=dict)
    size: int = TIB
    used: int = 0
    blocksize: int = 4096

    def file_systems(
        self, statvfs: Callable[[Path], os.statvfs_result] | None = None
    ) -> FileSystems:
        lines = [
            f"{number} 1 8:{number} / {point} rw,relatime shared:1 - {kind} /dev/disk{number} rw"
            for number, (point, kind) in enumerate(({"/": "ext4"} | dict(self.kinds)).items())
        ]
        write(self.table, "\n".join(lines) + "\n")
        return FileSystems(mountinfo=self.table, statvfs=statvfs or self.statvfs)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """As the kernel answers, every directory on a disk of `size` bytes with `used` in use."""
        total, free = self.size // self.blocksize, (self.size - self.used) // self.blocksize
        return os.statvfs_result(
            (self.blocksize, self.blocksize, total, free, free, 0, 0, 0, 0, 255)
        )
