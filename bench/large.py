"""A store with very many pages: exists, opening it, and making its index anew.

Pages carry 4 KiB of payload, so that hundreds of thousands of them take seconds to store and a few
GiB of disk. They go in through the connector itself, in calls larger than the engine makes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.disk import PageCache
from bench.measure import Numbers, Sample, Written, load, time_exists
from bench.plan import BATCH_PAGES, KIB, BenchError, Plan, large_bytes
from bench.pools import HostPages
from bench.subjects import Ours

PAGE = 4 * KIB
OPEN, REBUILD = "open", "index rebuild"
_FEW = 300
_CALL = 2048
_LAYOUT = "page_first"


class BigStore:
    """A slab store being filled with 4 KiB pages."""

    def __init__(self, directory: Path, capacity_pages: int, numbers: Numbers) -> None:
        self.directory, self._numbers = directory, numbers
        # An eighth to spare: the last segment may not be used to its end.
        self._capacity = large_bytes(capacity_pages) * 9 // 8
        self.few, self.many = HostPages(PAGE, _LAYOUT, _FEW), HostPages(PAGE, _LAYOUT, _CALL)
        self.stored = 0
        self.kept: list[Written] = []
        self.questions: list[list[str]] = []

    def open(self, host: HostPages) -> tuple[Ours, float]:
        """The connector on this directory and the seconds until it answers."""
        subject = Ours()
        start = time.perf_counter()
        subject.setup(host, self.directory, self._capacity)
        subject.exists(self.questions[0] if self.questions else ["0" * 64])
        return subject, time.perf_counter() - start

    def store(self, subject: Ours, host: HostPages, keep: bool = False) -> None:
        """One call."""
        batch = self._numbers.batch(host.count)
        host.stamp(batch.number)
        stored = sum(subject.set(batch.keys))
        if stored < host.count:
            raise BenchError(f"ours: {host.count - stored} of {host.count} pages were not stored")
        self.stored += stored
        self.questions.append(batch.keys[:BATCH_PAGES])
        if keep:
            self.kept.append(batch)

    def fill(self, subject: Ours, pages: int, progress: Callable[[str], None]) -> None:
        """Store until `pages` are there; the first and the last call are remembered."""
        while self.stored < pages:
            last = self.stored + self.many.count >= pages
            self.store(subject, self.many, keep=last or not self.kept)
            progress(f"filling: {self.stored:,} pages")


def run_large(
    plan: Plan, directory: Path, numbers: Numbers, step: Callable[[str], None]
) -> Iterator[Sample]:
    """`exists` of 128 keys with 300 pages stored and with `large_pages`."""
    store = BigStore(directory, plan.large_pages, numbers)
    subject, _ = store.open(store.few)
    try:
        store.store(subject, store.few, keep=True)
        yield from _exists_rounds(plan, store, subject, numbers)
    finally:
        subject.close()
    subject, _ = store.open(store.many)
    try:
        store.fill(subject, plan.large_pages, step)
        yield from _exists_rounds(plan, store, subject, numbers)
    finally:
        subject.close()


def _exists_rounds(
    plan: Plan, store: BigStore, subject: Ours, numbers: Numbers
) -> Iterator[Sample]:
    # from all over the store, not those still warm from being written
    there = store.questions[:: max(1, len(store.questions) // plan.exists_calls)]
    absent = [numbers.batch(BATCH_PAGES).keys for _ in there]
    for number in range(plan.rounds):
        for name, asked in (("present", there), ("absent", absent)):
            seconds = time_exists(subject, asked, name == "present", plan.exists_calls)
            yield Sample(
                f"exists, {store.stored:,} stored, {name}",
                PAGE,
                _LAYOUT,
                "ours",
                number,
                seconds,
                keys=BATCH_PAGES,
            )


def run_open(
    plan: Plan, directory: Path, cache: PageCache, numbers: Numbers, step: Callable[[str], None]
) -> Iterator[Sample]:
    """Opening a closed store of `large_pages`, and one of `rebuild_slots` that lost its index."""
    for operation, pages in ((REBUILD, plan.rebuild_slots), (OPEN, plan.large_pages)):
        here = directory / operation.replace(" ", "-")
        store = BigStore(here, pages, numbers)
        subject, _ = store.open(store.many)
        try:
            store.fill(subject, pages, step)
        finally:
            subject.close()
        for number in range(plan.rounds):
            if operation == REBUILD and not Ours.drop_index(here):
                raise BenchError(f"{here}: no index file to delete; the store's layout changed")
            cache.drop()
            step(f"{operation}, {store.stored:,} pages")
            subject, seconds = store.open(store.many)
            try:
                _check(subject, store)
            finally:
                subject.close()
            yield Sample(operation, PAGE, _LAYOUT, "ours", number, seconds, keys=store.stored)
        shutil.rmtree(here)


def _check(subject: Ours, store: BigStore) -> None:
    """Nothing was lost: the first and the last call are there, and their bytes are right."""
    for batch in store.kept:
        time_exists(subject, [batch.keys], present=True, calls=1)
        load(subject, store.many, batch)
