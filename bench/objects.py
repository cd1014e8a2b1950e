"""The object store beside in-tree's, bare NIXL and a plain client, on one S3 server.

Sets and gets in alternating rounds, every page compared, every request counted by the server.
`object_lookups.py` has what is measured besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from bench.measure import Numbers, Sample, Written
from bench.object_lookups import run_down, run_lookups
from bench.object_place import ObjectPlace
from bench.object_subjects import ObjectSubject, make_object_subjects
from bench.plan import BenchError, Plan, format_size
from bench.pools import HostPages
from bench.s3_server import S3Server

SET, GET = "object set", "object get"

_T = TypeVar("_T")


def run_objects(
    plan: Plan, directory: Path, numbers: Numbers, step: Callable[[str], None]
) -> Iterator[Sample]:
    """The samples. Starts a server and ends it."""
    step("starting the S3 server")
    with closing(S3Server(directory / "server")) as server:
        server.start()
        for page in plan.object_pages:
            for layout in plan.object_layouts:
                yield from measure_cell(plan, server, page, layout, numbers, step)
        yield from run_lookups(plan, server, numbers, step)
        yield from run_down(plan, server, numbers, step)


def measure_cell(
    plan: Plan,
    server: S3Server,
    page: int,
    layout: str,
    numbers: Numbers,
    step: Callable[[str], None],
) -> Iterator[Sample]:
    """Sets and gets of one page size in one layout, in a bucket that is dropped afterwards."""
    bucket = f"bench-{page}-{layout.replace('_', '-')}"
    server.make_bucket(bucket)
    host = HostPages(page, layout, plan.batch_pages(page))
    subjects = make_object_subjects(plan.subjects, ObjectPlace(server.endpoint, bucket))
    try:
        for subject in subjects:
            subject.setup(host, Path(), 0)
        for number in range(plan.rounds):
            stored: dict[str, list[Written]] = {}
            for operation in (SET, GET):
                for subject in _turn(subjects, number):
                    step(f"{format_size(page)} {layout}, {operation}: {subject.name}")
                    before = server.requests()
                    if operation == SET:
                        seconds, stored[subject.name] = _store(subject, host, numbers, plan)
                        good, asked = _stored_pages(stored[subject.name])
                    else:
                        seconds, good, asked = _load(subject, host, stored[subject.name])
                    yield Sample(
                        operation, page, layout, subject.name, number, seconds,
                        nbytes=good * page, failed_pages=asked - good,
                        requests=(server.requests() - before).total(),
                    )  # fmt: skip
    finally:
        for subject in subjects:
            subject.close()
    server.drop_bucket(bucket)


def _turn(subjects: Sequence[_T], number: int) -> list[_T]:
    """Everybody once, each round beginning with another."""
    shift = number % max(1, len(subjects))
    return [*subjects[shift:], *subjects[:shift]]


def _store(
    subject: ObjectSubject, host: HostPages, numbers: Numbers, plan: Plan
) -> tuple[float, list[Written]]:
    seconds, sample = 0.0, list[Written]()
    while len(sample) < plan.batches(host.page_bytes) and seconds < plan.sample_seconds:
        batch = numbers.batch(host.count)
        host.stamp(batch.number)
        subject.load()
        start = time.perf_counter()
        batch.results = subject.set(batch.keys)
        seconds += time.perf_counter() - start
        sample.append(batch)
    if not any(any(batch.results) for batch in sample):
        raise BenchError(f"{subject.name}: not one page was stored")
    return seconds, sample


def _stored_pages(sample: Sequence[Written]) -> tuple[int, int]:
    return sum(sum(batch.results) for batch in sample), sum(len(batch.keys) for batch in sample)


def _load(
    subject: ObjectSubject, host: HostPages, sample: Sequence[Written]
) -> tuple[float, int, int]:
    """Seconds, pages whose bytes were the right ones, pages asked for."""
    seconds, good, asked = 0.0, 0, 0
    for batch in sample:
        host.poison()
        start = time.perf_counter()
        results = subject.get(batch.keys)
        seconds += time.perf_counter() - start
        subject.unload()
        good += host.verified(batch.number, results)
        asked += sum(batch.results)
    return seconds, good, asked
