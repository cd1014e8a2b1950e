"""What one run measures, how much it moves and how much disk that takes.

Knows sizes and counts only: nothing of SGLang, NIXL, fio or the terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TRAILER = 4096
_LEAST_SAMPLES = 4  # those read back must not be evicted
_ITEM = 2  # bytes of a bfloat16
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
WHAT = ("set", "get", "exists", "files", "objects", "modes", "large")
SUBJECTS = ("ours", "v2", "files", "objects", "in-tree", "nixl", "fio", "raw")
OBJECT_SUBJECTS = ("objects", "in-tree", "nixl", "raw")
OBJECT_PAGES, OBJECT_LAYOUTS = (256 * KIB, 2 * MIB), ("layer_first", "page_first")
BATCH_PAGES = 128
"""Pages in one call, the batch SGLang's storage threads use."""

_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "K": KIB, "M": MIB, "G": GIB}


class BenchError(Exception):
    """A run that cannot start or whose figures would be worthless; one line, shown as it is."""


def parse_size(text: str) -> int:
    """Bytes of `"256KiB"`, `"2M"` or `"4096"`; a `BenchError` for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise BenchError(f"size {text!r}: write it as 64KiB, 2MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def format_size(nbytes: float) -> str:
    """`262144` as `"256 KiB"`; one decimal where it does not divide."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{nbytes:g} B"


def parse_pages(text: str) -> tuple[int, ...]:
    """Page sizes of a comma list, ascending."""
    sizes = {parse_size(part) for part in text.split(",")}
    return tuple(sorted(shape_of(size).nbytes for size in sizes))


def choose(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The comma list `text` in the order of `known`; a `BenchError` names the unknown entry."""
    asked = [part.strip() for part in text.split(",") if part.strip()]
    for part in asked:
        if part not in known:
            raise BenchError(f"--{name} {part!r}: known are {', '.join(known)}")
    if not asked:
        raise BenchError(f"--{name} is empty: give at least one of {', '.join(known)}")
    return tuple(part for part in known if part in asked)


@dataclass(frozen=True)
class PageShape:
    """Tokens, layers, heads and head width whose K and V make one page."""

    tokens: int
    layers: int
    heads: int
    head_dim: int

    @property
    def row(self) -> int:
        """Bytes of K of one token in one layer."""
        return self.heads * self.head_dim * _ITEM

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return 2 * self.tokens * self.layers * self.row


# Shapes as served models have them: 2 MiB is an 8B Llama, 9 MiB a 36-layer Qwen with 64-token
# pages; the small ones are what a rank of a wide tensor-parallel group holds.
_SHAPES = {
    4 * KIB: PageShape(16, 1, 1, 64),
    64 * KIB: PageShape(16, 4, 2, 128),
    256 * KIB: PageShape(16, 16, 2, 128),
    2 * MIB: PageShape(16, 32, 8, 128),
    9 * MIB: PageShape(64, 36, 8, 128),
}


def shape_of(page: int) -> PageShape:
    """The shape of a page of `page` bytes; a `BenchError` where no whole number of layers fits."""
    if page in _SHAPES:
        return _SHAPES[page]
    for heads in (8, 4, 2, 1):
        layer = 2 * 16 * heads * 128 * _ITEM
        if page % layer == 0 and 1 <= page // layer <= 128:
            return PageShape(16, page // layer, heads, 128)
    raise BenchError(f"--pages {format_size(page)}: take a multiple of 8 KiB up to 8 MiB, or 9 MiB")


@dataclass(frozen=True)
class Plan:
    """One run. Sizes in bytes."""

    pages: tuple[int, ...]
    layouts: tuple[str, ...]
    what: tuple[str, ...]
    subjects: tuple[str, ...] = SUBJECTS
    rounds: int = 5
    sample_bytes: int = 512 * MIB
    """Payload one subject moves in one round of one operation; at least one batch."""
    sample_seconds: float = 1.0
    """A sample ends with the batch that passes this."""
    fio_bytes: int = GIB
    max_batch_bytes: int = 2 * GIB
    exists_calls: int = 50
    large_pages: int = 300_000
    rebuild_slots: int = 100_000
    object_pages: tuple[int, ...] = OBJECT_PAGES
    object_layouts: tuple[str, ...] = OBJECT_LAYOUTS

    def batch_pages(self, page: int) -> int:
        """Pages per call: 128 as the engine does, fewer where `max_batch_bytes` forbids it."""
        return max(1, min(BATCH_PAGES, self.max_batch_bytes // page))

    def batches(self, page: int) -> int:
        """Calls in one sample."""
        return max(1, self.sample_bytes // (page * self.batch_pages(page)))

    def sample_pages(self, page: int) -> int:
        """Pages one sample moves."""
        return self.batches(page) * self.batch_pages(page)

    def capacity(self, page: int) -> int:
        """Byte budget of a store that the fresh rounds about fill, trailers included."""
        return max(self.rounds, _LEAST_SAMPLES) * self.sample_pages(page) * (page + TRAILER)

    @property
    def fio_file(self) -> int:
        """Size of fio's file: what the largest store holds, so that caches below see the same."""
        largest = max((self.capacity(page) for page in self.pages), default=0)
        return max(2 * self.fio_bytes, min(largest, 4 * GIB) // self.fio_bytes * self.fio_bytes)

    def disk_needed(self) -> int:
        """Most bytes on disk at one time, with a tenth to spare."""
        cells = [
            3 * self.capacity(page) + 3 * self.sample_pages(page) * (page + TRAILER)
            for page in self.pages
        ]
        if "modes" in self.what:
            page = self.modes_page()
            cells.append(8 * 3 * self.sample_pages(page) * (page + TRAILER))
        if "large" in self.what:
            cells.append(large_bytes(self.large_pages))
        if "objects" in self.what:
            kept = self.rounds * sum(name in OBJECT_SUBJECTS for name in self.subjects)
            cells += [kept * self.sample_pages(page) * page for page in self.object_pages]
        return (max(cells, default=0) + self.fio_file) * 11 // 10

    def modes_page(self) -> int:
        """The page size of the buffered / O_DIRECT and AIO / io_uring comparison."""
        return max((page for page in self.pages if page <= 2 * MIB), default=self.pages[0])


def large_bytes(pages: int) -> int:
    """Disk for `pages` of 4 KiB payload, each with its trailer, and an index beside them."""
    return pages * (2 * TRAILER + 512)


def full_plan(
    pages: tuple[int, ...],
    layouts: tuple[str, ...],
    what: tuple[str, ...],
    subjects: tuple[str, ...],
    rounds: int,
) -> Plan:
    """The measurement `make bench` takes."""
    return Plan(pages, layouts, what, subjects, rounds)


def quick_plan(
    pages: tuple[int, ...],
    layouts: tuple[str, ...],
    what: tuple[str, ...],
    subjects: tuple[str, ...],
    rounds: int,
) -> Plan:
    """A look in under a minute: a quarter of the bytes, fewer calls, smaller batches."""
    return Plan(
        pages,
        layouts,
        what,
        subjects,
        rounds,
        sample_bytes=128 * MIB,
        sample_seconds=0.4,
        fio_bytes=512 * MIB,
        max_batch_bytes=128 * MIB,
        exists_calls=20,
        large_pages=20_000,
        rebuild_slots=10_000,
    )
