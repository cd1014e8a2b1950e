"""A store with the pages of two models, as SGLang would have left it."""

from collections.abc import Callable
from pathlib import Path

import pytest

import pools
from connectors import config, keys
from hicache_nixl import HiCacheNixlConnector
from s3_access import ADMIN
from s3_server import S3Address

PAGES = {"org/one": 8, "org/other": 4}


@pytest.fixture
def in_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's credentials where the AWS tools look for them, and nothing else of AWS."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ADMIN.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ADMIN.secret_key)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bucket_url(in_chain: None, s3: S3Address, make_bucket: Callable[[], str]) -> str:
    """URL of an empty object store."""
    return f"s3://{make_bucket()}/some/prefix?endpoint={s3.endpoint}"


@pytest.fixture(params=["slab", "files", "s3"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """URL of a closed store that holds `PAGES`, of each kind."""
    url = f"{request.param}://{tmp_path / 'store'}"
    if request.param == "s3":
        url = request.getfixturevalue("bucket_url")
    for model, count in PAGES.items():
        pool = pools.make_mha_pool("page_first", pages=8, page_size=16, layers=2)
        pools.fill(pool, count)
        connector = HiCacheNixlConnector(config(tmp_path, store=url, model_name=model), {})
        connector.register_mem_pool_host(pool)
        indices = pools.token_indices(list(range(count)), pool.page_size)
        assert connector.batch_set_v1(keys(count), indices) == [True] * count
        connector.close()
    return url
