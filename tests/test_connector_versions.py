"""What the connector learns from older SGLang versions; `versions` runs them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import pools
from hicache_nixl import connector_versions
from hicache_nixl.errors import RegistrationError

OLD_FIELDS: dict[str, Any] = {"tp_rank": 1, "tp_size": 2, "is_mla_model": False}
ARGUMENTS = {"pp_size": 1, "attn_cp_size": 1}

Engine = Callable[..., None]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Sets the server arguments that an older version has."""

    def set_arguments(**arguments: int) -> None:
        monkeypatch.setattr(
            "sglang.srt.server_args.get_global_server_args", lambda: SimpleNamespace(**arguments)
        )

    return set_arguments


def test_a_complete_configuration_is_taken_as_it_is() -> None:
    """That of the pinned version is not touched and the engine not asked."""
    config = pools.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=1,
        pp_size=2,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
    )
    assert connector_versions.complete(config) is config


def test_an_engine_without_further_ranks_completes_the_configuration(engine: Engine) -> None:
    """Sizes that the engine says are 1, or has not heard of, are 1; what was there stays."""
    engine(**ARGUMENTS)
    complete = connector_versions.complete(SimpleNamespace(**OLD_FIELDS))
    assert vars(complete) == OLD_FIELDS | {
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dcp_rank": 0,
        "dcp_size": 1,
        "is_storage_writer": True,
    }


@pytest.mark.parametrize(
    ("is_mla", "rank", "writes"), [(False, 1, True), (True, 0, True), (True, 1, False)]
)
def test_one_rank_writes_for_mla(engine: Engine, is_mla: bool, rank: int, writes: bool) -> None:
    """Of ranks with the same bytes only the first is the storage's writer."""
    engine(**ARGUMENTS)
    config = SimpleNamespace(**OLD_FIELDS | {"is_mla_model": is_mla, "tp_rank": rank})
    assert connector_versions.complete(config).is_storage_writer is writes


@pytest.mark.parametrize("name", ["pp_size", "attn_cp_size", "dcp_size"])
def test_ranks_that_cannot_be_told_apart_are_refused(engine: Engine, name: str) -> None:
    """A size other than 1 that the configuration does not name is an error that does."""
    engine(**ARGUMENTS | {name: 2})
    with pytest.raises(RegistrationError, match=f"^{name} is 2"):
        connector_versions.complete(SimpleNamespace(**OLD_FIELDS))


def test_an_engine_that_does_not_say_is_refused() -> None:
    """Outside a server the sizes are not known, and not taken to be 1."""
    with pytest.raises(RegistrationError, match="pp_size is not in the storage configuration"):
        connector_versions.complete(SimpleNamespace(**OLD_FIELDS))
