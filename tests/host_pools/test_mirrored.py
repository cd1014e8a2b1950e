"""What host pools of older SGLang versions leave to their device pool."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools import attribute, mirrored


class MHATokenToKVPool:
    """A device pool with the given attributes, by the name of SGLang's class."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class MLATokenToKVPool(MHATokenToKVPool):
    pass


class DSATokenToKVPool(MLATokenToKVPool):
    pass


def host(device: Any) -> SimpleNamespace:
    return SimpleNamespace(device_pool=device)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("v_head_dim", MHATokenToKVPool(head_dim=8), 8),
        ("v_head_dim", MHATokenToKVPool(head_dim=8, v_head_dim=4), 4),
        ("kv_cache_dim", MLATokenToKVPool(kv_cache_dim=24), 24),
        ("target_layer_num", MHATokenToKVPool(layer_num=3), 3),
        ("dsa_kv_cache_store_fp8", MLATokenToKVPool(), False),
        ("dsa_kv_cache_store_fp8", MLATokenToKVPool(nsa_kv_cache_store_fp8=True), True),
        ("dsa_kv_cache_store_fp8", MLATokenToKVPool(dsa_kv_cache_store_fp8=True), True),
        ("_layer_shard_enabled", MLATokenToKVPool(), False),
        ("_layer_shard_enabled", MLATokenToKVPool(layer_shard_enabled=True), True),
    ],
)
def test_what_the_host_pool_does_not_say_is_read_from_its_device_pool(
    name: str, device: Any, expected: object
) -> None:
    """Each such attribute has the value that the device pool, old or less old, gives it."""
    assert attribute(host(device), name) == expected


def test_the_host_pool_has_the_first_word() -> None:
    """An attribute of the host pool itself is taken whatever the device pool says."""
    pool = host(MHATokenToKVPool(v_head_dim=4))
    pool.v_head_dim = 8
    assert attribute(pool, "v_head_dim") == 8


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        (SimpleNamespace(), "v_head_dim"),
        (host(MHATokenToKVPool(head_num=4)), "head_num"),
        (host(MLATokenToKVPool()), "kv_cache_dim"),
    ],
    ids=["no device pool", "no such fact", "nothing there"],
)
def test_nothing_else_is_looked_for(pool: Any, name: str) -> None:
    """An attribute that is nowhere, or of which nothing is known, is an error that names it."""
    with pytest.raises(RegistrationError, match=f"no attribute '{name}'"):
        attribute(pool, name)


def test_an_unknown_device_pool_is_refused() -> None:
    """A subclass may keep other bytes in the same rows; it is named."""
    with pytest.raises(RegistrationError, match="DSATokenToKVPool"):
        attribute(host(DSATokenToKVPool(kv_cache_dim=24)), "kv_cache_dim")
    with pytest.raises(RegistrationError, match="DSATokenToKVPool"):
        mirrored.row_layouts([DSATokenToKVPool()])


def test_row_layouts_are_those_of_all_device_pools() -> None:
    """Device pools that do not name the order of a row have the one of old versions."""
    devices = [MHATokenToKVPool(), MHATokenToKVPool(kv_cache_layout="hnd")]
    assert mirrored.row_layouts(devices) == {"nhd", "hnd"}
