"""Objects where no rate tells: looking for many pages over a network, and a server that is gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.delay_proxy import delayed
from bench.measure import Numbers, Sample, ask
from bench.object_place import ObjectPlace
from bench.object_subjects import InTreeOnObjects, OursOnObjects
from bench.plan import KIB, BenchError, Plan
from bench.pools import HostPages
from bench.s3_server import S3Server

PAGE, LAYOUT, KEYS = 4 * KIB, "page_first", 512
ROUND_TRIP = 0.010
LOOKUP = f"object exists {KEYS}"
PRESENT, ABSENT, HALF = (f"{LOOKUP}, {name}" for name in ("present", "absent", "half"))
FIRST, LATER = "server down, first", "server down, later"
SHIPPED = "in-tree, own threads"
_DOWN_KEYS = 8
_DOWN_CALLS, _DOWN_SETTLE = 20, 8
_BUCKET = "bench-lookups"

_Connector = OursOnObjects | InTreeOnObjects


def _connectors(plan: Plan, place: ObjectPlace) -> list[_Connector]:
    known = (OursOnObjects, InTreeOnObjects)
    return [kind(place) for kind in known if kind.name in plan.subjects]


def _store(subject: _Connector, host: HostPages, numbers: Numbers) -> list[str]:
    batch = numbers.batch(host.count)
    host.stamp(batch.number)
    if not all(subject.set(batch.keys)):
        raise BenchError(f"{subject.name}: {host.count} pages were not stored")
    return batch.keys


def run_lookups(
    plan: Plan, server: S3Server, numbers: Numbers, step: Callable[[str], None]
) -> Iterator[Sample]:
    """`exists` of 512 keys a 10 ms round trip away: all there, none there, the first half there.

    Other keys in each call, and stored by another connector: nobody can know the answer.
    """
    server.make_bucket(_BUCKET)
    near = ObjectPlace(server.endpoint, _BUCKET)
    whole, half = HostPages(PAGE, LAYOUT, KEYS), HostPages(PAGE, LAYOUT, KEYS // 2)
    stored: dict[str, list[tuple[list[str], list[str]]]] = {}
    for subject in _connectors(plan, near):
        step(f"{LOOKUP}: {subject.name} stores")
        stored[subject.name] = _keys_stored(subject, whole, half, plan.rounds, numbers)
    with delayed(server.port, ROUND_TRIP) as endpoint:
        askers = _connectors(plan, replace(near, endpoint=endpoint))
        try:
            for subject in askers:
                subject.setup(whole, Path(), 0)
            for number in range(plan.rounds):
                for subject in askers:
                    step(f"{LOOKUP}: {subject.name}")
                    yield from _ask(subject, server, stored[subject.name][number], number, numbers)
            if InTreeOnObjects.name in stored:
                step(f"{LOOKUP}: {SHIPPED}")
                shipped = InTreeOnObjects(replace(near, endpoint=endpoint, concurrency=None))
                shipped.name = SHIPPED
                askers.append(shipped)
                shipped.setup(whole, Path(), 0)
                # A quarter of a minute a call: one is enough.
                yield next(_ask(shipped, server, stored[InTreeOnObjects.name][0], 0, numbers))
        finally:
            for subject in askers:
                subject.close()
    server.drop_bucket(_BUCKET)


def _keys_stored(
    subject: _Connector, whole: HostPages, half: HostPages, rounds: int, numbers: Numbers
) -> list[tuple[list[str], list[str]]]:
    """For each round 512 keys and another 256, all of them stored."""
    kept: list[list[list[str]]] = []
    for host in (whole, half):
        subject.setup(host, Path(), 0)
        kept.append([_store(subject, host, numbers) for _ in range(rounds)])
        subject.close()
    return list(zip(*kept, strict=True))


def _ask(
    subject: _Connector,
    server: S3Server,
    stored: tuple[list[str], list[str]],
    number: int,
    numbers: Numbers,
) -> Iterator[Sample]:
    present, half = stored
    absent = numbers.batch(KEYS).keys
    for operation, keys, expected in (
        (PRESENT, present, KEYS),
        (ABSENT, absent, 0),
        (HALF, half + absent[: KEYS - len(half)], len(half)),
    ):
        before = server.requests()
        seconds = ask(subject, keys, expected)
        yield Sample(
            operation, PAGE, LAYOUT, subject.name, number, seconds, keys=KEYS,
            requests=(server.requests() - before).total(),
        )  # fmt: skip


def run_down(
    plan: Plan, server: S3Server, numbers: Numbers, step: Callable[[str], None]
) -> Iterator[Sample]:
    """Calls after the server was killed: the first one, and those that come later.

    Kills the server.
    """
    server.make_bucket(_BUCKET)
    host = HostPages(PAGE, LAYOUT, _DOWN_KEYS)
    subjects = _connectors(plan, ObjectPlace(server.endpoint, _BUCKET))
    try:
        stored: dict[str, list[str]] = {}
        for subject in subjects:
            subject.setup(host, Path(), 0)
            stored[subject.name] = _store(subject, host, numbers)
        server.kill()
        with _quiet():
            for subject in subjects:
                step(f"server down: {subject.name}")
                yield from _fail(subject, stored[subject.name], numbers)
    finally:
        for subject in subjects:
            subject.close()


def _fail(subject: _Connector, stored: list[str], numbers: Numbers) -> Iterator[Sample]:
    fresh = numbers.batch(_DOWN_KEYS).keys
    for name, call, keys in (("get", subject.get, stored), ("set", subject.set, fresh)):

        def sample(operation: str, number: int) -> Sample:
            seconds = _time(call, keys, subject.name)  # noqa: B023 - called in the same turn
            who = subject.name
            return Sample(operation, PAGE, LAYOUT, who, number, seconds, keys=_DOWN_KEYS)

        yield sample(f"{FIRST} {name}", 0)
        if isinstance(subject, InTreeOnObjects):
            return  # it has no circuit: each of its calls takes as long as the first
        for _ in range(_DOWN_SETTLE):
            _time(call, keys, subject.name)
        for number in range(_DOWN_CALLS):
            yield sample(f"{LATER} {name}", number)


def _time(call: Callable[[Sequence[str]], list[bool]], keys: Sequence[str], who: str) -> float:
    start = time.perf_counter()
    results = call(keys)
    seconds = time.perf_counter() - start
    if any(results):
        raise BenchError(f"{who}: a page moved although the server is gone")
    return seconds


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log messages of failures that are asked for."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
