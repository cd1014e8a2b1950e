"""The in-tree connector and ours, one after the other on the same directory and configuration."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

import pools
from connectors import config, keys

# isort: split
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl
from sglang.srt.mem_cache.storage.nixl.nixl_cleaner import HiCacheL3Cleaner

from configurations import STORAGE_DIR
from hicache_nixl import HiCacheNixlConnector

PAGES = 8
IN_TREE: dict[str, Any] = {
    "plugin": {"posix": {"active": True, "use_aio": "true"}, "gds": {"batch_limit": 128}},
    "use_direct_io": False,
    "l3_cleaner_high_watermark": 99.0,
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the in-tree variable names; it does not exist yet."""
    monkeypatch.setenv(STORAGE_DIR, str(tmp_path / "deep" / "kv"))
    return tmp_path / "deep" / "kv"


@pytest.fixture
def pool() -> Any:
    """A host pool with seeded pages."""
    made = pools.make_mha_pool("page_first", pages=PAGES, page_size=16, layers=2)
    pools.fill(made, 3)
    return made


def in_tree(pool: Any) -> HiCacheNixl:
    made = config(Path("/unused"))
    made.extra_config = dict(IN_TREE)
    connector = HiCacheNixl(made)
    connector.register_mem_pool_host(pool)
    return connector


def ours(pool: Any) -> HiCacheNixlConnector:
    """With the same extra config and only the loader's keys beside it."""
    made = config(Path("/unused"))
    loader = {key: made.extra_config[key] for key in ("backend_name", "class_name", "interface_v1")}
    made.extra_config = loader | IN_TREE | {"staging": "4MiB"}
    connector = HiCacheNixlConnector(made, {})
    connector.register_mem_pool_host(pool)
    return connector


def files_of(directory: Path) -> dict[str, str]:
    """Digest of each file outside our store."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and "hicache-nixl" not in path.parts
    }


def test_switch_and_back(directory: Path, pool: Any) -> None:
    """After the switch nothing of the in-tree data is read or changed; after the way back it is."""
    names, indices = keys(PAGES), pools.token_indices(list(range(PAGES)), 16)
    content = [pools.page_bytes(pool, page) for page in range(PAGES)]

    before = in_tree(pool)
    assert before.batch_set_v1(names, indices) == [True] * PAGES
    before.close()
    theirs = files_of(directory)
    assert theirs

    connector = ours(pool)
    assert connector.batch_exists(names) == 0
    assert connector.batch_set_v1(names, indices) == [True] * PAGES
    pools.clear(pool)
    assert connector.batch_get_v1(names, indices) == [True] * PAGES
    assert [pools.page_bytes(pool, page) for page in range(PAGES)] == content
    connector.clear()
    connector.close()
    assert (directory / "hicache-nixl" / "store.json").is_file()
    assert files_of(directory) == theirs

    pools.clear(pool)
    back = in_tree(pool)
    assert back.batch_exists(names) == PAGES
    assert back.batch_get_v1(names, indices) == [True] * PAGES
    assert [pools.page_bytes(pool, page) for page in range(PAGES)] == content
    back.close()


def test_in_tree_cleaner_leaves_the_store_alone(directory: Path, pool: Any) -> None:
    """A pass of the in-tree cleaner that deletes everything it knows deletes nothing of ours."""
    names, indices = keys(PAGES), pools.token_indices(list(range(PAGES)), 16)
    before = in_tree(pool)
    assert before.batch_set_v1(names, indices) == [True] * PAGES
    before.close()
    connector = ours(pool)
    assert connector.batch_set_v1(names, indices) == [True] * PAGES
    cleaner = HiCacheL3Cleaner([str(directory)], 0, high_watermark=1e-9, low_watermark=0.0)
    assert cleaner._tick()
    assert files_of(directory) == {}
    assert connector.batch_exists(names) == PAGES
    assert connector.batch_get_v1(names, indices) == [True] * PAGES
    connector.close()


def test_the_log_says_how_each_key_was_understood(
    directory: Path, pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each key of the in-tree connector, when the connector starts."""
    with caplog.at_level(logging.INFO):
        ours(pool).close()
    said = [record.getMessage() for record in caplog.records]
    for key in (
        STORAGE_DIR,
        "plugin.posix.active",
        "plugin.posix.use_aio",
        "plugin.gds",
        "l3_cleaner_high_watermark",
    ):
        assert sum(key in line for line in said) == 1, key
