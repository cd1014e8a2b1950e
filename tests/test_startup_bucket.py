"""Putting a tier on a bucket together: what works, what is released, what is never shown."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pools
from connectors import config, keys
from hicache_nixl import HiCacheNixlConnector, startup
from hicache_nixl.errors import HiCacheNixlError, StoreError
from hicache_nixl.memory import allocate
from hicache_nixl.settings import load_settings
from hicache_nixl.stores.objects import ObjectsStore
from s3_access import ADMIN, STRANGER, Identity
from s3_server import S3Address

PAGES = 8


@pytest.fixture(autouse=True)
def no_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of AWS in the environment, so that only what a test configures can count."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        if name not in ("AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def in_clear(who: Identity = ADMIN) -> dict[str, str]:
    return {"access_key": who.access_key, "secret_key": who.secret_key}


@pytest.fixture
def place(s3: S3Address, make_bucket: Callable[[], str]) -> dict[str, str]:
    """An empty bucket, in NIXL's words."""
    return {"bucket": make_bucket(), "endpoint_override": s3.endpoint, "scheme": "http"}


FORMS: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "map": lambda place: {"plugin": {"obj": {"active": True} | place | in_clear()}},
    "dotted": lambda place: {
        "plugin.obj.active": "true",
        **{f"plugin.obj.{name}": value for name, value in (place | in_clear()).items()},
    },
    "flat": lambda place: {"plugin": "obj"} | place | in_clear(),
    "crt": lambda place: {
        "plugin": {"obj": {"active": True, "crtMinLimit": "4096"} | place | in_clear()}
    },
    "url": lambda place: (
        {"store": f"s3://{place['bucket']}/own?endpoint={place['endpoint_override']}"} | in_clear()
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_in_tree_configurations_work(
    form: str,
    place: dict[str, str],
    tmp_path: Path,
    s3: S3Address,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A connector with in-tree's configuration stores pages that another one reads, byte by byte,
    and neither log nor configuration shows a secret."""
    caplog.set_level(logging.DEBUG)
    changes = {"store": None} | FORMS[form](place)
    written = pools.make_mha_pool("page_first", pages=PAGES, page_size=16, layers=2)
    read = pools.make_mha_pool("page_first", pages=PAGES, page_size=16, layers=2)
    pools.fill(written, PAGES)
    indices = pools.token_indices(list(range(PAGES)), written.page_size)
    first = HiCacheNixlConnector(config(tmp_path, **changes), {})
    first.register_mem_pool_host(written)
    assert first.batch_set_v1(keys(PAGES), indices) == [True] * PAGES
    first.close()
    second = HiCacheNixlConnector(config(tmp_path, **changes), {})
    second.register_mem_pool_host(read)
    assert second.batch_exists(keys(PAGES)) == PAGES
    assert second.batch_get_v1(keys(PAGES), indices) == [True] * PAGES
    assert torch.equal(read.kv_buffer.view(torch.int16), written.kv_buffer.view(torch.int16))
    second.close()
    prefix = "own" if form == "url" else "hicache-nixl"
    assert len(s3.keys(place["bucket"], f"{prefix}/pages/")) == PAGES
    assert ADMIN.secret_key not in caplog.text
    assert "HiCache NIXL" in caplog.text


def settings(place: dict[str, str], who: Identity = ADMIN, **changes: Any) -> Any:
    url = f"s3://{place['bucket']}/p?endpoint={place['endpoint_override']}"
    values = {"store": url, "staging": "1MiB"} | in_clear(who) | changes
    return load_settings(values, environ={})


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_everything_is_released(place: dict[str, str]) -> None:
    """After close() there are no more descriptors and threads than before, and no staging."""
    startup.assemble(settings(place)).close()
    before, threads = descriptors(), threading.active_count()
    tier = startup.assemble(settings(place))
    assert isinstance(tier.store, ObjectsStore)
    assert tier.bucket is not None
    assert tier.choice.parameters == {}
    tier.close()
    tier.close()
    buffer = tier.buffer
    del tier
    gc.collect()
    assert not buffer.mapped
    assert threading.active_count() <= threads
    end = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < end:  # obstore closes on its own thread
        time.sleep(0.05)
    assert descriptors() <= before


@pytest.mark.parametrize("wrong", ["bucket", "credentials", "endpoint", "ca_bundle"])
def test_a_start_that_fails_leaves_nothing(
    wrong: str, place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that cannot be used stops the start in one line without secrets, and everything
    that was made before is released."""
    kept: list[Any] = []
    monkeypatch.setattr(
        startup, "allocate", lambda *args, **more: kept.append(allocate(*args, **more)) or kept[-1]
    )
    changes: dict[str, Any] = {"deadline": "3s"}
    who = ADMIN
    if wrong == "bucket":
        place = place | {"bucket": place["bucket"] + "-not"}
    elif wrong == "credentials":
        who = STRANGER
    elif wrong == "endpoint":
        place = place | {"endpoint_override": "http://127.0.0.1:1"}
    else:
        url = f"s3://{place['bucket']}?endpoint=https://127.0.0.1:1&ca_bundle=/nowhere/ca.pem"
        changes["store"] = url
    threads = threading.active_count()
    with pytest.raises(HiCacheNixlError) as caught:
        startup.assemble(settings(place, who, **changes))
    message = str(caught.value)
    assert "\n" not in message
    assert who.secret_key not in message
    words = {
        "bucket": place["bucket"],
        "credentials": "keys in the settings",
        "endpoint": "127.0.0.1:1",
        "ca_bundle": "/nowhere/ca.pem",
    }
    assert words[wrong] in message
    caught = None  # type: ignore[assignment]
    gc.collect()
    assert all(not buffer.mapped for buffer in kept[-1:])
    assert threading.active_count() <= threads


def test_missing_bucket_is_made_when_asked(place: dict[str, str], s3: S3Address) -> None:
    """create_bucket makes the bucket at start; without it none is made."""
    place = place | {"bucket": place["bucket"] + "-new"}
    with pytest.raises(StoreError, match=place["bucket"]):
        startup.assemble(settings(place))
    try:
        startup.assemble(settings(place, create_bucket=True)).close()
        assert s3.keys(place["bucket"]) == ["p/store.json"]
    finally:
        s3.remove_bucket(place["bucket"])


class Engine:
    """Stands for an engine whose transfers are late."""

    def __init__(self, late: int) -> None:
        self.late_transfers = late

    def drain(self) -> bool:
        return self.late_transfers == 0

    def close(self) -> None:
        pass


def test_staging_outlives_late_transfers() -> None:
    """Staging memory that a late transfer may write into stays mapped when its tier is closed and
    forgotten, and goes once the transfer has ended."""
    engine, idle = Engine(1), Engine(0)
    nothing = SimpleNamespace(close=lambda: None)
    buffer = allocate(1 << 20)

    def tier(reader: Any, memory: Any) -> startup.Tier:
        parts: Any = (None, None, reader, idle, None, nothing, nothing, None, memory)
        return startup.Tier(*parts)

    tier(engine, buffer).close()
    gone = buffer._finalizer
    del buffer
    gc.collect()
    assert gone.alive
    engine.late_transfers = 0
    tier(idle, allocate(1 << 20)).close()
    gc.collect()
    assert not gone.alive
