from pathlib import Path

import pytest

from hicache_nixl.plugin_files import why_not_loaded


@pytest.mark.parametrize("place", [".nixl_x.mesonpy.libs/plugins", "nixl_x.libs/nixl"])
def test_the_loader_says_why(tmp_path: Path, place: str) -> None:
    """Of a plug-in's file that cannot be loaded, in either of the places where wheels keep it."""
    directory = tmp_path / place
    directory.mkdir(parents=True)
    assert why_not_loaded(tmp_path / "nixl_x", "OBJ") is None
    (directory / "libplugin_OBJ.so").write_bytes(b"no library")
    assert "libplugin_OBJ.so" in (why_not_loaded(tmp_path / "nixl_x", "OBJ") or "")
    assert why_not_loaded(tmp_path / "nixl_x", "POSIX") is None
