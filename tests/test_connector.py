"""The connector as SGLang calls it, on real host pools of SGLang, without an engine."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pools
from connectors import config, corrupt, keys
from hicache_nixl import HiCacheNixlConnector
from hicache_nixl.errors import HiCacheNixlError, RegistrationError, SettingsError, StoreError
from pools import HiCacheStorageExtraInfo

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGES = 16


@pytest.fixture
def connect(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Makes connectors with a pool registered, all closed at the end."""
    opened = []

    def make(pool: Any, directory: Path | None = None, **changes: Any) -> HiCacheNixlConnector:
        connector = HiCacheNixlConnector(config(directory or tmp_path / "store", **changes), {})
        opened.append(connector)
        connector.register_mem_pool_host(pool)
        connector.on_host_pools_registered()
        return connector

    yield make
    for connector in opened:
        connector.close()


def mha(layout: str = "page_first", **changes: Any) -> Any:
    """An MHA pool of PAGES pages with random bytes; 4 layers, 8 KiB a page and component."""
    shape = {"pages": PAGES, "page_size": 16, "layers": 4, "heads": 2, "head_dim": 32}
    pool = pools.make_mha_pool(layout, **(shape | changes))
    pools.fill(pool, 1)
    return pool


def all_indices(pool: Any, pages: int = PAGES) -> torch.Tensor:
    return pools.token_indices(list(range(pages)), pool.page_size)


def page_bytes(pool: Any, pages: int = PAGES) -> list[bytes]:
    return [pools.page_bytes(pool, page) for page in range(pages)]


# -- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_direct_io", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mha_round_trip(connect: Any, layout: str, use_direct_io: bool) -> None:
    """Every page comes back byte for byte, in every layout, with and without O_DIRECT."""
    pool = mha(layout)
    wanted = page_bytes(pool)
    connector = connect(pool, use_direct_io=use_direct_io)
    assert connector.batch_exists(keys(PAGES)) == 0
    assert connector.batch_set_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    assert connector.batch_exists(keys(PAGES)) == PAGES
    pools.clear(pool)
    assert connector.batch_get_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    assert page_bytes(pool) == wanted


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_mla_round_trip(connect: Any, layout: str) -> None:
    """An MLA pool round-trips in each of its layouts."""
    pool = pools.make_mla_pool(layout, pages=PAGES, page_size=16, layers=4, kv_lora_rank=64)
    pools.fill(pool, 2)
    wanted = page_bytes(pool)
    connector = connect(pool, is_mla_model=True)
    assert connector.batch_set_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    pools.clear(pool)
    assert connector.batch_get_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    assert page_bytes(pool) == wanted


def test_pages_move_to_the_places_asked_for(connect: Any) -> None:
    """A page is read into the host page that the indices name, and no other page changes."""
    pool = mha()
    wanted = page_bytes(pool)
    connector = connect(pool)
    connector.batch_set_v1(keys(PAGES), all_indices(pool))
    pools.fill(pool, 9)
    before = page_bytes(pool)
    places = pools.token_indices([7, 3], pool.page_size)
    assert connector.batch_get_v1(keys(2), places) == [True] * 2
    after = page_bytes(pool)
    assert after[7] == wanted[0]
    assert after[3] == wanted[1]
    assert [after[i] for i in range(PAGES) if i not in (3, 7)] == [
        before[i] for i in range(PAGES) if i not in (3, 7)
    ]


def test_big_segments_move_in_place(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A pool with aligned segments of 128 KiB moves without a copy and says so."""
    caplog.set_level(logging.INFO)
    pool = mha(layers=8, head_dim=128, heads=4, pages=PAGES)
    wanted = page_bytes(pool)
    connector = connect(pool)
    assert "in place" in caplog.text
    assert connector.batch_set_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    pools.clear(pool)
    assert connector.batch_get_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    assert page_bytes(pool) == wanted


def test_odd_page_size(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Pages of 3 x 1300 bytes, no multiple of 4 KiB, round-trip with O_DIRECT through staging."""
    caplog.set_level(logging.INFO)
    pool = mha(page_size=1, layers=3, heads=1, head_dim=325, dtype=torch.float16)
    assert sum(map(len, page_bytes(pool, 1))) == 3 * 1300
    wanted = page_bytes(pool)
    connector = connect(pool)
    assert "through staging" in caplog.text
    assert connector.batch_set_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    pools.clear(pool)
    assert connector.batch_get_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    assert page_bytes(pool) == wanted


def test_more_pages_than_staging(connect: Any) -> None:
    """200 pages in one call round-trip with a staging budget of 8 pages."""
    pool = mha(pages=200, page_size=16, layers=8, heads=4, head_dim=64)  # 128 KiB
    assert len(pools.page_bytes(pool, 0)) == 128 * 1024
    wanted = page_bytes(pool, 200)
    connector = connect(pool, staging=8 * (128 + 4) * 1024)
    assert connector.batch_set_v1(keys(200), all_indices(pool, 200)) == [True] * 200
    pools.clear(pool)
    assert connector.batch_get_v1(keys(200), all_indices(pool, 200)) == [True] * 200
    assert page_bytes(pool, 200) == wanted


def test_pages_outlive_the_connector(connect: Any) -> None:
    """A connector that opens the same store finds what another one has written."""
    pool = mha()
    wanted = page_bytes(pool)
    first = connect(pool)
    first.batch_set_v1(keys(PAGES), all_indices(pool))
    first.close()
    again = mha()
    pools.clear(again)
    second = connect(again)
    assert second.batch_exists(keys(PAGES)) == PAGES
    assert second.batch_get_v1(keys(PAGES), all_indices(again)) == [True] * PAGES
    assert page_bytes(again) == wanted


# -- identity -------------------------------------------------------------------------------------


def assert_shares_nothing(connect: Any, one: Any, other: Any, **changes: Any) -> None:
    """What is written through pool `one` is missing through `other`, which stays as it was."""
    writer = connect(one, **{k: v[0] for k, v in changes.items()})
    assert writer.batch_set_v1(keys(4), all_indices(one, 4)) == [True] * 4
    reader = connect(other, **{k: v[1] for k, v in changes.items()})
    before = page_bytes(other)
    assert reader.batch_exists(keys(4)) == 0
    assert reader.batch_get_v1(keys(4), all_indices(other, 4)) == [False] * 4
    assert page_bytes(other) == before


@pytest.mark.parametrize("other", [torch.float8_e4m3fn, torch.float16], ids=["fp8", "fp16"])
def test_dtypes_do_not_mix(connect: Any, other: torch.dtype) -> None:
    """bf16 pages are missing for an fp8 pool and for an fp16 pool of the same bytes."""
    assert_shares_nothing(connect, mha(dtype=torch.bfloat16), mha(dtype=other))


def test_byte_orders_do_not_mix(connect: Any) -> None:
    """page_first pages are missing for a page_first_direct pool of the same size."""
    assert_shares_nothing(connect, mha("page_first"), mha("page_first_direct"))


def test_equal_byte_orders_share(connect: Any) -> None:
    """layer_first pages are found by a page_first_direct pool, equal page by page."""
    one, other = mha("layer_first"), mha("page_first_direct")
    pools.clear(other)
    connect(one).batch_set_v1(keys(4), all_indices(one, 4))
    reader = connect(other)
    assert reader.batch_exists(keys(4)) == 4
    assert reader.batch_get_v1(keys(4), all_indices(other, 4)) == [True] * 4
    assert page_bytes(other, 4) == page_bytes(one, 4)


def test_pipeline_stages_do_not_mix(connect: Any) -> None:
    """Stage 0 and stage 1 of 2 with equally many layers have pages of their own."""
    assert_shares_nothing(
        connect,
        mha(start_layer=0, end_layer=4),
        mha(start_layer=4, end_layer=8),
        pp_rank=(0, 1),
        pp_size=(2, 2),
    )


def test_model_names_do_not_mix(connect: Any) -> None:
    """org/a-b and org-a/b are two models."""
    assert_shares_nothing(connect, mha(), mha(), model_name=("org/a-b", "org-a/b"))


def test_mla_ranks_share_one_writer(connect: Any) -> None:
    """Rank 0 of 4 writes an MLA page; ranks 1 to 3 read it, and their sets write nothing."""

    def mla() -> Any:
        return pools.make_mla_pool("page_first", pages=PAGES, page_size=16, layers=4)

    rank0 = mla()
    pools.fill(rank0, 3)
    for rank in (1, 2, 3):
        pool = mla()
        pools.fill(pool, 4)
        connector = connect(pool, is_mla_model=True, tp_rank=rank, tp_size=4)
        assert connector.batch_set_v1(keys(4), all_indices(pool, 4)) == [True] * 4
        assert connector.batch_exists(keys(4)) == 0
    writer = connect(rank0, is_mla_model=True, tp_rank=0, tp_size=4)
    assert writer.batch_set_v1(keys(4), all_indices(rank0, 4)) == [True] * 4
    for rank in (1, 2, 3):
        pool = mla()
        connector = connect(pool, is_mla_model=True, tp_rank=rank, tp_size=4)
        assert connector.batch_get_v1(keys(4), all_indices(pool, 4)) == [True] * 4
        assert page_bytes(pool, 4) == page_bytes(rank0, 4)


def test_clear_is_scoped(connect: Any) -> None:
    """clear() of one model leaves the pages of another on the same store."""
    one, other = mha(), mha()
    first = connect(one, model_name="org/one")
    second = connect(other, model_name="org/other")
    for connector, pool in ((first, one), (second, other)):
        connector.batch_set_v1(keys(4), all_indices(pool, 4))
    assert first.clear() is True
    assert first.batch_exists(keys(4)) == 0
    assert second.batch_exists(keys(4)) == 4
    assert second.batch_get_v1(keys(4), all_indices(other, 4)) == [True] * 4


# -- prefixes and damage --------------------------------------------------------------------------


def test_exists_stops_at_the_first_hole(connect: Any) -> None:
    """Of 512 pages of which page 200 is missing, 200 exist."""
    pool = mha(pages=128, page_size=1, layers=1)
    connector = connect(pool)
    names = keys(512)
    for start in range(0, 512, 128):
        part = [(i, key) for i, key in enumerate(names[start : start + 128]) if start + i != 200]
        indices = pools.token_indices([i for i, _ in part], 1)
        assert all(connector.batch_set_v1([key for _, key in part], indices))
    assert connector.batch_exists(names) == 200


def test_a_flipped_bit_is_a_miss(connect: Any, tmp_path: Path) -> None:
    """Three good pages, then one with a flipped bit: True, True, True, False, and it can be
    written again."""
    pool = mha()
    wanted = page_bytes(pool)
    connector = connect(pool, use_direct_io=False)
    connector.batch_set_v1(keys(PAGES), all_indices(pool))
    corrupt(tmp_path / "store", wanted[3][:64])
    pools.clear(pool)
    results = connector.batch_get_v1(keys(PAGES), all_indices(pool))
    assert results[:4] == [True, True, True, False]
    for page, (found, right) in enumerate(zip(results, wanted, strict=True)):
        assert not found or pools.page_bytes(pool, page) == right
    assert connector.batch_exists(keys(PAGES)) == 3
    pools.fill(pool, 1)
    assert connector.batch_set_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    pools.clear(pool)
    assert connector.batch_get_v1(keys(PAGES), all_indices(pool)) == [True] * PAGES
    assert page_bytes(pool) == wanted


def test_storage_trouble_is_a_miss(
    connect: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an index that fails, calls return misses and log one line each; nothing is raised."""
    pool = mha()
    connector = connect(pool)
    connector.batch_set_v1(keys(4), all_indices(pool, 4))
    connector._tier.store._opening.index.close()
    caplog.clear()
    for _ in range(3):
        assert connector.batch_exists(keys(4)) == 0
        assert connector.batch_get_v1(keys(4), all_indices(pool, 4)) == [False] * 4
        assert connector.batch_set_v1(keys(4), all_indices(pool, 4)) == [False] * 4
    assert connector.clear() is False
    troubles = [r for r in caplog.records if "became a miss" in r.message]
    assert len(troubles) == 4  # one for each kind of call


# -- use and misuse -------------------------------------------------------------------------------


def test_prefix_keys_are_wanted(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without prefix keys one warning names the SGLang setting that passes them; with them none."""
    pool = mha()
    connector = connect(pool)
    info = HiCacheStorageExtraInfo(prefix_keys=keys(2, "p"))
    connector.batch_set_v1(keys(2), all_indices(pool, 2), info)
    assert "hicache_storage_pass_prefix_keys" not in caplog.text
    for _ in range(2):
        connector.batch_set_v1(keys(2), all_indices(pool, 2))
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


def test_call_before_register(tmp_path: Path) -> None:
    """A call before a pool is registered is one clear error."""
    connector = HiCacheNixlConnector(config(tmp_path / "store"), {})
    try:
        for call in (
            lambda: connector.batch_exists(keys(1)),
            lambda: connector.batch_get_v1(keys(1), torch.arange(16)),
            lambda: connector.batch_set_v1(keys(1), torch.arange(16)),
        ):
            with pytest.raises(RegistrationError, match="register_mem_pool_host first"):
                call()
    finally:
        connector.close()


def test_register_twice(connect: Any) -> None:
    """The same pool again changes nothing; a second one is refused and the first stays in use."""
    pool = mha()
    connector = connect(pool)
    connector.register_mem_pool_host(pool)
    with pytest.raises(RegistrationError, match="'kv' is registered already"):
        connector.register_mem_pool_host(mha())
    assert connector.batch_set_v1(keys(1), all_indices(pool, 1)) == [True]


def test_unknown_layout(connect: Any) -> None:
    """A pool in a layout that is not understood is refused by name."""
    pool = mha()
    pool.layout = "page_last"
    with pytest.raises(RegistrationError, match="page_last"):
        connect(pool)


def test_lengths_must_fit(connect: Any) -> None:
    """Keys and indices of different lengths are an error that names both; nothing is written."""
    pool = mha()
    connector = connect(pool)
    for call in (connector.batch_set_v1, connector.batch_get_v1):
        with pytest.raises(RegistrationError, match="16 host indices for 2 keys"):
            call(keys(2), all_indices(pool, 1))
    assert connector.batch_exists(keys(2)) == 0
    assert connector.batch_set_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_page_larger_than_staging_or_capacity(tmp_path: Path) -> None:
    """A page that staging or capacity cannot hold is refused when its pool is registered."""
    pool = mha(page_size=64, layers=9, heads=7, head_dim=257)  # 4.1 MB, not aligned
    for changes, word in (({"staging": "2MiB"}, "staging"), ({"capacity": "3MiB"}, "capacity")):
        connector = HiCacheNixlConnector(
            config(tmp_path / word, **({"staging": "16MiB"} | changes)), {}
        )
        try:
            with pytest.raises(RegistrationError, match=f"raise {word}"):
                connector.register_mem_pool_host(pool)
        finally:
            connector.close()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"capcity": "1GiB"}, SettingsError, "capacity"),
        ({"capacity": "lots"}, SettingsError, "capacity"),
        ({"segment": "128MiB"}, SettingsError, "segment"),
        ({"store": "slab:///nowhere/at/all"}, StoreError, "/nowhere/at"),
        ({"plugin": "obj"}, HiCacheNixlError, "obj"),
    ],
)
def test_bad_configuration(
    tmp_path: Path, changes: dict[str, str], error: type[Exception], words: str
) -> None:
    """Bad configuration is one line that names what is wrong, and no directory is made."""
    with pytest.raises(error, match=words) as caught:
        HiCacheNixlConnector(config(tmp_path / "store", **changes), {})
    assert "\n" not in str(caught.value)


def test_one_tensor_interface_is_refused(connect: Any) -> None:
    """The deprecated calls say which setting SGLang needs."""
    connector = connect(mha())
    for call in (connector.get, connector.batch_get, connector.set, connector.batch_set):
        with pytest.raises(NotImplementedError, match="interface_v1"):
            call(keys(1)[0])


def test_closed_connector(connect: Any) -> None:
    """close() twice is fine; calls after it are errors, not crashes."""
    pool = mha()
    connector = connect(pool)
    connector.close()
    connector.close()
    with pytest.raises(RegistrationError, match="closed"):
        connector.batch_exists(keys(1))


def test_stats_count_moved_pages(connect: Any) -> None:
    """get_stats gives a sample for each call since the last one, of pages that really moved."""
    pool = mha()
    connector = connect(pool)
    connector.batch_set_v1(keys(4), all_indices(pool, 4))
    connector.batch_get_v1(keys(5), all_indices(pool, 5))
    stats = connector.get_stats()
    assert stats.backup_pgs == [4]
    assert stats.prefetch_pgs == [4]
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert connector.get_stats().backup_pgs == []


def test_backup_and_prefetch_threads_together(connect: Any) -> None:
    """Threads that set and get the same and other pages at once never see a wrong byte."""
    pool = mha(pages=96)
    wanted = page_bytes(pool, 32)
    connector = connect(pool)
    failures: list[str] = []

    def backup(offset: int) -> None:
        for _ in range(20):
            connector.batch_set_v1(keys(32), pools.token_indices(list(range(32)), 16))
            connector.clear()

    def prefetch(offset: int) -> None:
        places = list(range(offset, offset + 32))
        for _ in range(20):
            results = connector.batch_get_v1(keys(32), pools.token_indices(places, 16))
            failures.extend(
                f"page {i} is wrong"
                for i, found in enumerate(results)
                if found and pools.page_bytes(pool, places[i]) != wanted[i]
            )

    threads = [
        threading.Thread(target=target, args=(offset,))
        for target, offset in ((backup, 0), (backup, 0), (prefetch, 32), (prefetch, 64))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert np.array_equal(page_bytes(pool, 32), wanted)
