"""Buffered or O_DIRECT, AIO or io_uring: both connectors, one page size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.disk import PageCache
from bench.measure import Entrant, Numbers, Sample, load, store_sample
from bench.plan import TRAILER, BenchError, Plan
from bench.pools import HostPages
from bench.subjects import InTree, Mode, Ours, Subject

SET_CALL, SET_SYNCED = "set, call returns", "set, on the medium"
GET_COLD, GET_AGAIN = "get, caches dropped", "get, again"
OPERATIONS = (SET_CALL, SET_SYNCED, GET_COLD, GET_AGAIN)
MODES = (Mode(True, "aio"), Mode(True, "uring"), Mode(False, "aio"), Mode(False, "uring"))


def run_modes(
    plan: Plan,
    directory: Path,
    cache: PageCache,
    numbers: Numbers,
    step: Callable[[str], None],
    note: Callable[[str], None],
) -> Iterator[Sample]:
    """The samples; `note` gets a line for each mode that does not start here."""
    page, layout = plan.modes_page(), plan.layouts[0]
    host = HostPages(page, layout, plan.batch_pages(page))
    entrants: list[tuple[str, Entrant]] = []
    makers: dict[str, Callable[[Mode], Subject]] = {"ours": Ours, "in-tree": InTree}
    # Room for a few samples: the rounds after the first ones run in a full store.
    capacity = 4 * plan.sample_pages(page) * (page + TRAILER)
    try:
        for mode in MODES:
            for name, make in makers.items():
                if name not in plan.subjects:
                    continue
                subject, label = make(mode), f"{name}, {mode.label}"
                try:
                    subject.setup(host, directory / label.replace(", ", "-"), capacity)
                except BenchError as error:
                    note(str(error))
                    continue
                entrants.append((label, Entrant(subject)))
        for number in range(plan.rounds):
            shift = number % max(1, len(entrants))
            for label, entrant in entrants[shift:] + entrants[:shift]:
                step(f"modes: {label}")
                for operation, seconds, nbytes, failed in _round(
                    entrant, host, cache, numbers, plan
                ):
                    yield Sample(operation, page, layout, label, number, seconds, nbytes, failed)
    finally:
        for _, entrant in entrants:
            entrant.subject.close()


def _round(
    entrant: Entrant, host: HostPages, cache: PageCache, numbers: Numbers, plan: Plan
) -> Iterator[tuple[str, float, int, int]]:
    os.sync()
    # No reading back here: it would give a buffered mode time to write on unseen.
    seconds, nbytes, failed = store_sample(entrant, host, numbers, plan)
    start = time.perf_counter()
    os.sync()
    synced = time.perf_counter() - start
    yield SET_CALL, seconds, nbytes, failed
    yield SET_SYNCED, seconds + synced, nbytes, failed
    for operation in (GET_COLD, GET_AGAIN):
        if operation == GET_COLD:
            cache.drop()
        moved = [load(entrant.subject, host, batch) for batch in entrant.samples[-1]]
        seconds, nbytes, failed = (sum(column) for column in zip(*moved, strict=True))
        yield operation, seconds, nbytes, failed
