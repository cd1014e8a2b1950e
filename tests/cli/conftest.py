"""A store with the pages of two models, as SGLang would have left it."""

from pathlib import Path

import pytest

import pools
from connectors import config, keys
from hicache_nixl import HiCacheNixlConnector

PAGES = {"org/one": 8, "org/other": 4}


@pytest.fixture(params=["slab", "files"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """URL of a closed store that holds `PAGES`, of each kind."""
    url = f"{request.param}://{tmp_path / 'store'}"
    for model, count in PAGES.items():
        pool = pools.make_mha_pool("page_first", pages=8, page_size=16, layers=2)
        pools.fill(pool, count)
        connector = HiCacheNixlConnector(config(tmp_path, store=url, model_name=model), {})
        connector.register_mem_pool_host(pool)
        indices = pools.token_indices(list(range(count)), pool.page_size)
        assert connector.batch_set_v1(keys(count), indices) == [True] * count
        connector.close()
    return url
