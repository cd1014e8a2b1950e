"""The block that says what was found and chosen."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_nixl import probe, startup
from hicache_nixl.io_choice import IoChoice
from hicache_nixl.settings import load_settings


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[startup.Tier]:
    """A started tier on a small store."""
    values = {"store": f"slab://{tmp_path / 'store'}", "capacity": "32.0MiB", "staging": "1.0MiB"}
    started = startup.assemble(load_settings(values, environ={}))
    yield started
    started.close()


def test_files_store_is_named(tmp_path: Path) -> None:
    """The block of a files store says what it is and where."""
    values = {"store": f"files://{tmp_path / 'store'}", "capacity": "32MiB", "staging": "1MiB"}
    tier = startup.assemble(load_settings(values, environ={}))
    try:
        assert f"files in {tmp_path / 'store'}" in probe.describe_tier(tier)
    finally:
        tier.close()


def by_topic(tier: Any) -> dict[str, probe.Finding]:
    return {row.topic: row for row in probe.findings(tier)}


def test_block_names_what_matters(tier: startup.Tier, tmp_path: Path) -> None:
    """Directory, budget, O_DIRECT, queue, staging, hugepages, verify and deadline have a line."""
    block = probe.describe_tier(tier)
    for word in (str(tmp_path), "32.0MiB", "O_DIRECT", "POSIX", "1.0MiB", "hugepages", "10"):
        assert word in block, word
    assert len(block.splitlines()) < 25


def test_fallbacks_come_with_advice(tier: startup.Tier) -> None:
    """What was refused at start is in the block, with what would be better."""
    tier.choice = IoChoice(
        "POSIX",
        "aio",
        {},
        False,
        ("O_DIRECT is refused in /x (Invalid argument); ...", "io_uring does not work here (no)"),
    )
    rows = by_topic(tier)
    assert rows["O_DIRECT"].found == "off"
    assert "refused" in str(rows["O_DIRECT"].better)
    assert "seccomp" in str(rows["I/O"].better)


def test_capacity_beyond_the_disk_is_told(tier: startup.Tier) -> None:
    """A budget that the disk cannot hold is pointed out before it is hit."""
    tier.store.capacity_bytes = 1 << 60
    assert "lower capacity" in str(by_topic(tier)["capacity"].better)


def test_trailer_only_verification_is_told(tier: startup.Tier) -> None:
    """verify=trailer is shown together with what it gives up."""
    tier.settings = SimpleNamespace(**(dict(tier.settings) | {"verify": "trailer"}))  # type: ignore[assignment]
    assert "full" in str(by_topic(tier)["verify"].better)
