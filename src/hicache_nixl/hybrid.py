"""How long a prefix can be restored when a page lies in several pools.

Owns: the policies by which a pool bears a prefix, and what follows for all of them together. Must
not know: SGLang, stores, namespaces; which pages are stored comes in through `Presence`.

Every count of pages is that of a prefix. A prefix of `p` pages can be restored if the anchor has
its pages 0 to p - 1 and each pool that gates it has

    all_pages        those pages too
    trailing_pages   the last `trailing` of them, or all if they are fewer

A pool of `trailing_pages` may bear 5 pages and not 4, so the answer is a set and not a maximum:
ranks that hold different sets have to agree on a member of each.

Under `block_groups` a pool holds the same pages in another form: of every `block_pages` pages a
group of `group_pages`, named by the keys at the end of the block, which alone tell everything
before them. Such a pool says how far it goes and gates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache_nixl.errors import RegistrationError

_Flags = npt.NDArray[np.bool_]


class HitPolicy(StrEnum):
    """Which pages of a pool a prefix needs; values are SGLang's."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass(frozen=True)
class Need:
    """What a prefix needs of one pool. Raises RegistrationError for a geometry without pages."""

    pool: str
    policy: HitPolicy = HitPolicy.ALL_PAGES
    trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0

    def __post_init__(self) -> None:
        if self.policy is HitPolicy.TRAILING_PAGES and self.trailing < 1:
            raise RegistrationError(
                f"pool {self.pool!r} needs {self.trailing} trailing pages: at least 1"
            )
        if self.gates:
            return
        if not 1 <= self.group_pages <= self.block_pages:
            raise RegistrationError(
                f"pool {self.pool!r} has groups of {self.group_pages} pages in blocks of "
                f"{self.block_pages}: a group has 1 to as many pages as its block"
            )

    @property
    def gates(self) -> bool:
        """Whether the pool limits what can be restored."""
        return self.policy is not HitPolicy.BLOCK_GROUPS


class Presence(Protocol):
    """Which of the first `pages` pages of a sequence are stored, pool by pool."""

    def leading_run(self, pool: str, pages: int) -> int:
        """How many of them, from the first on, `pool` holds."""

    def present(self, pool: str, pages: int) -> _Flags:
        """Which of them `pool` holds, shape (pages,)."""


@dataclass(frozen=True)
class Verdict:
    """`restorable` prefixes, ascending; `boundaries`: the longest prefix that each pool bears by
    itself, without the pools that bear none."""

    restorable: list[int]
    boundaries: dict[str, int]

    @property
    def pages(self) -> int:
        """The longest restorable prefix."""
        return self.restorable[-1] if self.restorable else 0


def restorable_prefixes(
    pages: int, anchor: str | None, needs: Sequence[Need], presence: Presence
) -> Verdict:
    """Which prefixes of a sequence of `pages` pages can be restored.

    `anchor` is the pool that must hold every page; None if that one has no bytes, and the pools
    that gate decide alone: without any there is nothing to restore. `presence` is asked once for
    each pool, and not for pools whose answer cannot matter.
    """
    boundaries: dict[str, int] = {}
    if anchor is not None:
        run = presence.leading_run(anchor, pages)
        _note(boundaries, anchor, run)
    else:
        run = pages if any(need.gates for need in needs) else 0
    usable = np.ones(run, np.bool_)  # element p - 1: the prefix of p pages
    for need in needs:
        if need.policy is HitPolicy.BLOCK_GROUPS:
            _note(boundaries, need.pool, _grouped(need, presence.present(need.pool, pages)))
        elif usable.any():
            bears = _bears(need, run, presence)
            _note(boundaries, need.pool, int(np.flatnonzero(bears)[-1]) + 1 if bears.any() else 0)
            usable &= bears
    return Verdict((np.flatnonzero(usable) + 1).tolist(), boundaries)


def _note(boundaries: dict[str, int], pool: str, pages: int) -> None:
    if pages:
        boundaries[pool] = pages


def _bears(need: Need, run: int, presence: Presence) -> _Flags:
    """Shape (run,): whether a pool that gates bears the prefix of 1, 2, … pages."""
    ends = np.arange(1, run + 1)
    if need.policy is HitPolicy.ALL_PAGES:
        return ends <= presence.leading_run(need.pool, run)
    counts = np.concatenate([[0], np.cumsum(presence.present(need.pool, run))])
    starts = np.maximum(ends - need.trailing, 0)
    flags: _Flags = counts[ends] - counts[starts] == ends - starts
    return flags


def _grouped(need: Need, present: _Flags) -> int:
    """Pages that the leading complete groups cover."""
    blocks = len(present) // need.block_pages
    keys = present[: blocks * need.block_pages].reshape(blocks, need.block_pages)
    whole = keys[:, need.block_pages - need.group_pages :].all(axis=1)
    return int(np.append(whole, False).argmin()) * need.block_pages
