"""The device without us: fio with O_DIRECT and libaio on the same file system.

One file, written through once before the first measurement, so that writes hit allocated blocks
as those of a full store do.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan import BATCH_PAGES, MIB, BenchError

_MAX_BLOCK = 4 * MIB
_MAX_IN_FLIGHT = 256 * MIB


@dataclass(frozen=True)
class FioResult:
    """Bytes fio moved and the seconds its I/O took, start-up excluded."""

    nbytes: int
    seconds: float


def fio_version() -> str:
    """`"fio-3.33"`; a `BenchError` with the command that installs it where there is none."""
    if shutil.which("fio") is None:
        raise BenchError("fio is missing, it measures the device: apt-get install fio")
    return _run(["fio", "--version"]).strip()


def block_size(page: int) -> int:
    """Bytes of one request: the page, at most 4 MiB."""
    return min(page, _MAX_BLOCK)


def depth(page: int) -> int:
    """Requests in flight: one batch of pages, at most 256 MiB."""
    return max(1, min(BATCH_PAGES, _MAX_IN_FLIGHT // block_size(page)))


def parse(output: str, operation: str) -> FioResult:
    """The `read` or `write` half of fio's JSON report for one job."""
    try:
        # fio puts notes in front of its JSON
        report: dict[str, Any] = json.loads(output[output.index("{") :])
        job = report["jobs"][0]
        error = int(job["error"])
        nbytes, rate = int(job[operation]["io_bytes"]), float(job[operation]["bw_bytes"])
    except (ValueError, KeyError, IndexError, TypeError) as problem:
        raise BenchError(f"fio: unreadable report ({problem!r}): {output[:80]!r}") from problem
    if error or not nbytes or not rate:
        raise BenchError(f"fio: {operation} failed with error {error} after {nbytes} bytes")
    # bw_bytes is exact where `runtime` is whole milliseconds
    return FioResult(nbytes, nbytes / rate)


class Fio:
    """fio on one file of `size` bytes; each call moves `step` bytes of it."""

    name = "fio"

    def __init__(self, file: Path, size: int, step: int) -> None:
        self._file, self._size, self._step = file, size, step
        self._offset = 0

    def lay_out(self) -> None:
        """Write the whole file once. Blocks."""
        self._measure("write", 4 * MIB, offset=0, span=self._size, nbytes=self._size, seed=0)

    def write(self, page: int) -> FioResult:
        """Sequential writes of page-sized blocks over the next stretch of the file."""
        self._offset = (self._offset + self._step) % self._size
        return self._measure("write", page, self._offset, self._step, self._step, seed=0)

    def read(self, page: int, seed: int) -> FioResult:
        """Random reads of page-sized blocks in the stretch written last."""
        return self._measure("randread", page, self._offset, self._step, self._step, seed)

    def _measure(
        self, mode: str, page: int, offset: int, span: int, nbytes: int, seed: int
    ) -> FioResult:
        size = block_size(page)
        command = [
            "fio",
            "--name=device",
            f"--filename={self._file}",
            f"--filesize={self._size}",
            f"--offset={offset}",
            f"--size={span}",
            f"--io_size={nbytes // size * size}",
            f"--rw={mode}",
            f"--bs={size}",
            f"--iodepth={depth(page)}",
            f"--randseed={seed + 1}",
            "--ioengine=libaio",
            "--direct=1",
            "--output-format=json",
        ]
        return parse(_run(command), "read" if mode == "randread" else "write")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired as late:
        raise BenchError("fio: no result after 300 s; is the device hung?") from late
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise BenchError(f"fio: exit code {done.returncode}: {lines[-1]}")
    return done.stdout
