"""The files store where no rate tells: looking for many pages, on a local disk and a slow one.

A slow file system is this one with a pause in the one call that looking at a page makes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Numbers, Sample, time_exists
from bench.plan import KIB, BenchError, Plan
from bench.pools import HostPages
from bench.subjects import InTree, OursOnFiles, Subject

PAGE, KEYS = 64 * KIB, 512
LAYOUT = "page_first"
PAUSE_S = 0.001
LOCAL, SLOW = f"exists {KEYS}", f"exists {KEYS} slow"


def run_files(
    plan: Plan, directory: Path, numbers: Numbers, step: Callable[[str], None]
) -> Iterator[Sample]:
    """`exists` of 512 keys that are there, and of 512 that are not; in-tree beside it."""
    host = HostPages(PAGE, LAYOUT, KEYS)
    there = [numbers.batch(KEYS) for _ in range(2)]
    absent = [numbers.batch(KEYS).keys for _ in there]
    subjects: list[Subject] = [OursOnFiles()]
    if InTree.name in plan.subjects:
        subjects.append(InTree())
    try:
        for subject in subjects:
            subject.setup(host, directory / subject.name, 8 * KEYS * PAGE)
            for batch in there:
                host.stamp(batch.number)
                if not all(subject.set(batch.keys)):
                    raise BenchError(f"{subject.name}: {KEYS} pages were not stored")
        for number in range(plan.rounds):
            for operation in (LOCAL, SLOW):
                for subject in subjects if operation == LOCAL else subjects[:1]:
                    step(f"{operation}: {subject.name}")
                    with _pauses(0 if operation == LOCAL else PAUSE_S):
                        for name, asked in (
                            ("present", [batch.keys for batch in there]),
                            ("absent", absent),
                        ):
                            seconds = time_exists(
                                subject, asked, name == "present", plan.exists_calls
                            )
                            yield Sample(
                                f"{operation}, {name}",
                                PAGE,
                                LAYOUT,
                                subject.name,
                                number,
                                seconds,
                                keys=KEYS,
                            )
    finally:
        for subject in subjects:
            subject.close()


@contextmanager
def _pauses(seconds: float) -> Iterator[None]:
    """Every look at a page of the files store takes so much longer."""
    from hicache_nixl.stores import files_pages

    fast = files_pages.stat_page

    def stat_page(path: str, directory: int) -> os.stat_result:
        time.sleep(seconds)
        return fast(path, directory)

    if seconds:
        files_pages.stat_page = stat_page
    try:
        yield
    finally:
        files_pages.stat_page = fast
