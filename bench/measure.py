"""The rounds: every subject in turn does the same work on the same pages, and is checked.

Clocks run around the calls only. Making the pages, dropping caches and comparing bytes happen
between them.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.disk import PageCache
from bench.fio import Fio
from bench.nixl_bare import BareNixl
from bench.plan import BATCH_PAGES, BenchError, Plan, format_size
from bench.pools import HostPages
from bench.subjects import InTree, Ours, OursByPool, OursOnFiles, Subject

FRESH, STEADY, COLD = "set fresh", "set full store", "get cold"
PRESENT, ABSENT = "exists, present", "exists, absent"
_KEPT_SAMPLES = 2
_FILL_SECONDS = 300


@dataclass(frozen=True)
class Sample:
    """One subject, one round of one operation.

    `nbytes` counts pages whose result was True and, for a get, whose bytes were the right ones.
    """

    operation: str
    page: int
    layout: str
    subject: str
    round: int
    seconds: float
    nbytes: int = 0
    failed_pages: int = 0
    keys: int = 0
    requests: int = 0
    """What an S3 server was asked meanwhile."""

    @property
    def rate(self) -> float:
        """GB/s of verified bytes."""
        return self.nbytes / self.seconds / 1e9


@dataclass
class Written:
    """One batch as it was stored."""

    number: int
    keys: list[str]
    results: list[bool] = field(default_factory=list)


@dataclass
class Entrant:
    """A subject at work and the samples it stored last."""

    subject: Subject
    samples: list[list[Written]] = field(default_factory=list)
    oldest_key: str = ""
    """The first page a bounded store evicts: the end of the first batch."""

    def keep(self, sample: list[Written]) -> None:
        """Remember a sample; the oldest beyond the last few is forgotten by the subject too."""
        self.oldest_key = self.oldest_key or sample[0].keys[-1]
        self.samples.append(sample)
        while len(self.samples) > _KEPT_SAMPLES:
            self.subject.forget([key for batch in self.samples.pop(0) for key in batch.keys])

    def questions(self) -> list[list[str]]:
        """The keys that are surely there, 128 for each call of `exists`, or all if there are fewer.

        Different keys in every call, as different prompts have.
        """
        keys = [key for sample in self.samples for batch in sample for key in batch.keys]
        size = min(BATCH_PAGES, len(keys))
        return [keys[start : start + size] for start in range(0, len(keys) - size + 1, size)]


class Numbers:
    """Batch numbers and their keys, never given twice in a run."""

    def __init__(self) -> None:
        self._next = 0

    def batch(self, pages: int) -> Written:
        """The next batch: keys as the engine makes them, 64 hex digits of a hash."""
        self._next += 1
        keys = [
            hashlib.sha256(f"{self._next}/{page}".encode()).hexdigest() for page in range(pages)
        ]
        return Written(self._next, keys)


def make_subjects(names: Sequence[str]) -> list[Subject]:
    """The subjects of `names` that hold pages; fio is not one of them."""
    known: dict[str, Callable[[], Subject]] = {
        "ours": Ours,
        "v2": OursByPool,
        "files": OursOnFiles,
        "in-tree": InTree,
        "nixl": BareNixl,
    }
    return [known[name]() for name in names if name in known]


def store_sample(
    entrant: Entrant, host: HostPages, numbers: Numbers, plan: Plan, *, read_back: bool = False
) -> tuple[float, int, int]:
    """Store one sample of fresh batches; seconds, bytes, failed pages.

    A slow subject stores fewer batches than a fast one. `read_back` checks the last one.
    """
    seconds, nbytes, failed, sample = 0.0, 0, 0, list[Written]()
    while len(sample) < plan.batches(host.page_bytes) and seconds < plan.sample_seconds:
        batch = numbers.batch(host.count)
        host.stamp(batch.number)
        start = time.perf_counter()
        batch.results = entrant.subject.set(batch.keys)
        seconds += time.perf_counter() - start
        stored = sum(batch.results)
        nbytes += stored * host.page_bytes
        failed += host.count - stored
        sample.append(batch)
    entrant.keep(sample)
    if read_back and any(sample[-1].results):
        load(entrant.subject, host, sample[-1])
    return seconds, nbytes, failed


def load(subject: Subject, host: HostPages, batch: Written) -> tuple[float, int, int]:
    """Read one batch and compare every byte; seconds, verified bytes, failed pages."""
    host.poison()
    start = time.perf_counter()
    results = subject.get(batch.keys)
    seconds = time.perf_counter() - start
    try:
        pages = host.verified(batch.number, results)
    except BenchError as wrong:
        raise BenchError(f"{subject.name}, {host.layout}: {wrong}") from wrong
    return seconds, pages * host.page_bytes, host.count - pages


class Cell:
    """One page size in one layout: all subjects, all operations, in alternating rounds."""

    def __init__(
        self,
        plan: Plan,
        page: int,
        layout: str,
        directory: Path,
        fio: Fio | None,
        cache: PageCache,
        numbers: Numbers,
        step: Callable[[str], None],
    ) -> None:
        self._plan, self._page, self._layout = plan, page, layout
        self._fio, self._cache, self._numbers, self._step = fio, cache, numbers, step
        self._host = HostPages(page, layout, plan.batch_pages(page))
        self._capacity = plan.capacity(page)
        self._entrants: list[Entrant] = []
        self._directory = directory

    def __enter__(self) -> Cell:
        try:
            for subject in make_subjects(self._plan.subjects):
                self._entrants.append(Entrant(subject))
                subject.setup(self._host, self._directory / subject.name, self._capacity)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for entrant in self._entrants:
            entrant.subject.close()

    def run(self) -> Iterator[Sample]:
        """The samples, as they are taken."""
        what = self._plan.what
        if "set" in what:
            yield from self._set_rounds(FRESH)
            self._fill()
            yield from self._set_rounds(STEADY)
        elif {"get", "exists"} & set(what):
            for entrant in self._entrants:
                for _ in range(_KEPT_SAMPLES):
                    store_sample(entrant, self._host, self._numbers, self._plan)
        if "get" in what:
            yield from self._get_rounds()
        if "exists" in what:
            yield from self._exists_rounds(PRESENT)
            yield from self._exists_rounds(ABSENT)

    def _turns(self, operation: str, indexed: bool = False) -> Iterator[tuple[int, Entrant | Fio]]:
        """Everybody once a round, each round beginning with another."""
        everybody: list[Entrant | Fio] = [
            entrant for entrant in self._entrants if entrant.subject.has_index or not indexed
        ]
        if self._fio is not None and not indexed:
            everybody.append(self._fio)
        for number in range(self._plan.rounds):
            shift = number % max(1, len(everybody))
            for who in everybody[shift:] + everybody[:shift]:
                name = who.name if isinstance(who, Fio) else who.subject.name
                self._step(f"{operation}: {name}")
                yield number, who

    def _sample(self, operation: str, who: str, number: int, **values: float) -> Sample:
        seconds = values.pop("seconds")
        counts = {name: int(value) for name, value in values.items()}
        return Sample(operation, self._page, self._layout, who, number, seconds, **counts)

    def _set_rounds(self, operation: str) -> Iterator[Sample]:
        last = self._plan.rounds - 1
        for number, who in self._turns(operation):
            os.sync()  # nobody pays for what the one before left dirty
            if isinstance(who, Fio):
                result = who.write(self._page)
                yield self._sample(
                    operation, who.name, number, seconds=result.seconds, nbytes=result.nbytes
                )
                continue
            seconds, nbytes, failed = store_sample(
                who, self._host, self._numbers, self._plan, read_back=number == last
            )
            yield self._sample(
                operation, who.subject.name, number,
                seconds=seconds, nbytes=nbytes, failed_pages=failed,
            )  # fmt: skip

    def _fill(self) -> None:
        """Go on until the bounded stores reuse space: ours evicts, bare NIXL starts over."""
        for entrant in self._entrants:
            subject = entrant.subject
            if isinstance(subject, InTree):
                continue
            self._step(f"filling: {subject.name}")
            start = time.monotonic()
            while time.monotonic() < start + _FILL_SECONDS:
                if not subject.has_index or not subject.exists([entrant.oldest_key]):
                    break
                store_sample(entrant, self._host, self._numbers, self._plan)
            else:
                raise BenchError(
                    f"{subject.name}: {_FILL_SECONDS} s of sets did not fill "
                    f"{format_size(self._capacity)}"
                )

    def _get_rounds(self) -> Iterator[Sample]:
        for number, who in self._turns(COLD):
            self._cache.drop()
            if isinstance(who, Fio):
                result = who.read(self._page, number)
                yield self._sample(
                    COLD, who.name, number, seconds=result.seconds, nbytes=result.nbytes
                )
                continue
            batches = who.samples[number % len(who.samples)]
            moved = [load(who.subject, self._host, batch) for batch in batches]
            seconds, nbytes, failed = (sum(column) for column in zip(*moved, strict=True))
            yield self._sample(
                COLD, who.subject.name, number,
                seconds=seconds, nbytes=nbytes, failed_pages=failed,
            )  # fmt: skip

    def _exists_rounds(self, operation: str) -> Iterator[Sample]:
        for number, who in self._turns(operation, indexed=True):
            if isinstance(who, Fio):
                continue
            asked, calls = who.questions(), self._plan.exists_calls
            if operation == ABSENT:
                asked = [self._numbers.batch(len(keys)).keys for keys in asked]
            seconds = time_exists(who.subject, asked, operation == PRESENT, calls)
            yield self._sample(
                operation, who.subject.name, number, seconds=seconds, keys=len(asked[0])
            )


def time_exists(
    subject: Subject, questions: Sequence[list[str]], present: bool, calls: int
) -> float:
    """Median seconds of `exists`, going through `questions`; a `BenchError` for a wrong answer."""
    taken = []
    for number in range(calls):
        keys = questions[number % len(questions)]
        taken.append(ask(subject, keys, len(keys) if present else 0))
    return statistics.median(taken)


def ask(subject: Subject, keys: list[str], stored: int) -> float:
    """Seconds of one `exists`; a `BenchError` where the answer is not `stored`."""
    start = time.perf_counter()
    found = subject.exists(keys)
    seconds = time.perf_counter() - start
    if found != stored:
        raise BenchError(
            f"{subject.name}: exists says {found} of {len(keys)} keys, {stored} are stored"
        )
    return seconds
