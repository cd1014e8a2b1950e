"""What the tier found and chose at start, in one block for people and as rows for programs."""

import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from hicache_nixl import __version__
from hicache_nixl.file_systems import FileSystems
from hicache_nixl.finding import Finding
from hicache_nixl.memory import hugepage_report
from hicache_nixl.probe_bucket import in_bucket
from hicache_nixl.startup import Tier
from hicache_nixl.units import format_duration, format_size


def findings(tier: Tier) -> list[Finding]:
    """Everything worth knowing about a tier that has started."""
    settings = tier.settings
    rows = [Finding("version", f"hicache-nixl {__version__}, NIXL {_nixl_version()}")]
    if tier.bucket is None:
        rows += _in_directories(tier)
    else:
        rows += in_bucket(tier.bucket)
    rows.append(_staging(tier))
    rows.append(_hugepages())
    rows.append(
        Finding(
            "verify",
            "every payload and trailer" if settings.verify == "full" else "trailers only",
            None if settings.verify == "full" else "verify=full also notices damaged payloads",
        )
    )
    rows.append(Finding("deadline", f"{format_duration(settings.deadline)} for each call"))
    rows.append(_descriptors())
    return rows


def describe_rows(rows: Sequence[Finding]) -> str:
    """The block, a line a finding, advice indented below."""
    width = max(len(row.topic) for row in rows)
    lines = ["HiCache NIXL"]
    for row in rows:
        lines.append(f"  {row.topic:<{width}}  {row.found}")
        if row.better is not None:
            lines.append(f"  {'':<{width}}  -> {row.better}")
    return "\n".join(lines)


def describe_tier(tier: Tier) -> str:
    """The block of a tier that has started."""
    return describe_rows(findings(tier))


def _in_directories(tier: Tier) -> list[Finding]:
    settings, choice, use = tier.settings, tier.choice, tier.store.use()
    directories = [Path(url.path) for url in settings.store]
    refused = next((note for note in choice.notes if note.startswith("O_DIRECT")), None)
    fallback = next((note for note in choice.notes if note.startswith("io_uring")), None)
    queue = {None: "", "uring": ", io_uring", "aio": ", Linux AIO"}[choice.queue]
    return [
        *(_directory(settings.store[0].scheme, directory) for directory in directories),
        _budget(use.capacity_bytes or 0, use.allocated_bytes or 0, use.pages or 0, directories),
        Finding("O_DIRECT", "on" if choice.direct_io else "off", refused),
        Finding(
            "I/O",
            f"NIXL {choice.plugin}{queue}; written and read back here",
            None
            if fallback is None
            else f"{fallback}; allow io_uring in the seccomp profile, or set queue=aio",
        ),
    ]


def _directory(store: str, directory: Path) -> Finding:
    mount = FileSystems().under(directory)
    free = shutil.disk_usage(directory).free
    in_memory = mount.kind in ("tmpfs", "ramfs")
    return Finding(
        "store",
        f"{store} in {directory} ({mount}, {format_size(free, digits=1)} free)",
        f"{mount.kind} is memory: pages do not outlive a restart of the machine; use a directory "
        "on NVMe"
        if in_memory
        else None,
    )


def _budget(capacity: int, allocated: int, pages: int, directories: Sequence[Path]) -> Finding:
    room = sum({d.stat().st_dev: shutil.disk_usage(d).free for d in directories}.values())
    short = capacity - allocated - room
    return Finding(
        "capacity",
        f"{format_size(capacity, digits=1)}, {format_size(allocated, digits=1)} allocated, "
        f"{pages} pages stored",
        f"the disk has {format_size(short, digits=1)} less than that free; lower capacity"
        if short > 0
        else None,
    )


def _staging(tier: Tier) -> Finding:
    buffer, wanted = tier.buffer, tier.settings.hugepages
    ordinary = buffer.page_size < 2 * 1024 * 1024
    return Finding(
        "staging",
        f"{format_size(tier.staging.nbytes, digits=1)} on {format_size(buffer.page_size)} pages",
        f"hugepages={wanted}, but it has ordinary pages; raise vm.nr_hugepages"
        if ordinary and wanted != "off"
        else None,
    )


def _hugepages() -> Finding:
    report = hugepage_report()
    pools = [
        f"{pool.free} of {pool.total} free, {format_size(pool.page_size)} each"
        for pool in report.pools
    ]
    return Finding("hugepages", "; ".join(pools) or "the kernel has none")


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        "descriptors",
        f"limit {soft}",
        "raise `ulimit -n` to 1024 or more" if soft < 1024 else None,
    )


def _nixl_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
