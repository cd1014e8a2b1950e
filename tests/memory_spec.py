"""What a child that uses host memory does (memory_child.py) and says, for both sides."""

from dataclasses import dataclass, field
from typing import Any

SHAPE = {"layers": 8, "page_size": 16, "heads": 4}
HEAD_DIM = {"aligned": 128, "unaligned": 126}
"""Pages of 256 KiB that move in place, and such whose halves are no multiple of 4096 bytes."""
SHAPE_2MIB = {"layers": 8, "page_size": 64, "heads": 8, "head_dim": 128}
"""As many pages as hugepages."""


@dataclass(frozen=True)
class Case:
    """A host pool of SGLang's, in an environment of its own, and what becomes of its pages."""

    pages: int
    shape: dict[str, int]
    environment: dict[str, str] = field(default_factory=dict)
    stores: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Store and settings; every page makes a round trip through each of them."""
    pins: bool = False
    """Whether to pin the pool, too."""


@dataclass
class Trip:
    """A round trip of all pages through one store."""

    stored: int
    read: int
    """Pages that came back, each compared."""
    extents: dict[str, int]
    """The fields of `observed.Extents`."""


@dataclass
class Seen:
    """What became of a case."""

    signal: str = ""
    """What ended it."""
    error: str = ""
    """Why SGLang got no pool."""
    page_kb: int = 0
    """Of the pages that hold the pool; it lies in one mapping."""
    hugetlb_kb: int = 0
    """Of that mapping, on hugepages."""
    pool_kb: int = 0
    trips: list[Trip] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    pinned: str = ""
    """What pinning said."""
    locked: str = ""
    """What mlock of the pool said; empty if it was done."""
