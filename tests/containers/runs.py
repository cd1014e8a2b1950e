"""A run of the tests, which owns everything on the Docker daemon that carries its label.

What a run made is removed when it ends; when it was killed, by a watcher that outlives it; when the
machine was switched off, by the next run of the same user. Works from one process or from many
workers of xdist. Other machines and containers may use the daemon: what cannot be judged from here
is taken for alive.

Command: ``python -m containers.runs RUN`` watches over a run.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hugepage_notes

from .podman import Podman

LABEL = "hicache-nixl.test-run"
ROOT = Path("/var/tmp") / f"hicache-nixl-test-runs-{os.getuid()}"
"""Outlives the machine's power, so that what a run left is known to be this machine's."""
NAME = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-(\d+)(-\w+)?")
REMOVAL = {"container": ("--force", "--volumes"), "network": (), "volume": ("--force",)}
"""What a run may leave, in the order in which it can be removed, and the options to remove it."""
QUIET_ROUNDS = 3
"""Looks at the daemon that must find nothing: what a killed worker asked for may still appear."""


class Run:
    """One run of pytest. All its workers see the same one."""

    def __init__(self, name: str) -> None:
        """`name` says the boot and the namespace of its first process, its id and its start."""
        if (parts := NAME.fullmatch(name)) is None:
            raise ValueError(f"{name!r} is no name of a run: use Run.current().name")
        self.name = name
        self.directory = ROOT / name
        self._boot, self._namespace = parts[1], parts[2]
        self._first = Process(int(parts[3]), parts[4])

    @classmethod
    def current(cls) -> "Run":
        """The run that this process belongs to."""
        pid = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        return cls("-".join([*_here(), str(pid), _start_time(pid)]))

    @property
    def labels(self) -> dict[str, str]:
        """What containers, networks and volumes of this run carry."""
        return {LABEL: self.name}

    @property
    def podman(self) -> Podman:
        """Podman for this run, see `Podman.begin`."""
        return Podman(self.directory)

    def is_alive(self) -> bool:
        """Whether a process of it still runs, as far as can be told from here: not of a run of
        another machine or process namespace, and after a reboot only of one that began here."""
        boot, namespace = _here()
        if self._boot != boot:
            return not self.directory.exists()
        return self._namespace != namespace or bool(self._running())

    def begin(self) -> None:
        """Join the run: every process calls it that makes something. The first one removes what
        dead runs left and lets somebody watch over this one. A run that was killed is an error."""
        with self.lock("begin"):
            self._join()
            if (self.directory / "watcher").exists():
                return
            for name in _known_runs():
                if not Run(name).is_alive():
                    Run(name).remove()
            with (self.directory / "watcher.log").open("wb") as log:
                watcher = subprocess.Popen(
                    [sys.executable, "-m", "containers.runs", self.name],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # What kills the run by its process group does not reach it.
                    start_new_session=True,
                )
            (self.directory / "watcher").write_text(str(watcher.pid))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned to the first worker that came here; JSON."""
        with self.lock(name):
            if (made := self.made_once(name)) is None:
                made = make()
                self._state(name).write_text(json.dumps(made))
            return made

    def made_once(self, name: str) -> Any:
        """What `once` has made; None before."""
        state = self._state(name)
        return json.loads(state.read_text()) if state.exists() else None

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Held by one process of the run at a time."""
        from filelock import FileLock

        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / f"{name}.lock"):
            yield

    def make(self, kind: Literal["network", "volume"]) -> str:
        """A new network or volume; its name. It ends with the run."""
        labels = [f"--label={name}={value}" for name, value in self.labels.items()]
        name = f"hicache-nixl-{secrets.token_hex(6)}"
        docker(kind, "create", *labels, name, check=True)
        return name

    @contextlib.contextmanager
    def made(self, kind: Literal["network", "volume"]) -> Iterator[str]:
        """A new network or volume for the length of a block, after which nothing may use it."""
        name = self.make(kind)
        try:
            yield name
        finally:
            docker(kind, "rm", *REMOVAL[kind], name, check=True)

    def remove(self) -> None:
        """Remove everything that carries the label of this run or that podman has of it, and its
        directory."""
        self.podman.remove()
        for kind, options in REMOVAL.items():
            found = self._ids(kind)
            if found:
                docker(kind, "rm", *options, *found)
        shutil.rmtree(self.directory, ignore_errors=True)

    def left(self) -> list[str]:
        """What on the daemon still carries its label, and podman's part."""
        found = [f"{kind} {name}" for kind in REMOVAL for name in self._ids(kind)]
        return [*found, "podman"] if self.podman.is_left() else found

    def watch(self) -> None:
        """Block until every process of the run has ended, then remove what they left, and give
        hugepages back."""
        while running := self._running():
            for process in running:
                process.wait()
        quiet = 0
        while quiet < QUIET_ROUNDS:
            quiet = 0 if self.left() else quiet + 1
            self.remove()
            time.sleep(1.0)
        hugepage_notes.restore()

    def _join(self) -> None:
        # Written before the look at the first process, so the watcher sees it or it is refused.
        process = Process(os.getpid(), _start_time(os.getpid()))
        (self.directory / f"process-{process.pid}-{process.start}").touch()
        if not self._first.is_running():
            raise RuntimeError(f"the run {self.name} was killed: start the tests again")

    def _running(self) -> list["Process"]:
        joined = [path.name.split("-")[1:] for path in self.directory.glob("process-*")]
        processes = [self._first, *(Process(int(pid), start) for pid, start in joined)]
        return [process for process in processes if process.is_running()]

    def _state(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _ids(self, kind: str) -> list[str]:
        return _list(kind, f"{LABEL}={self.name}", "--quiet").split()


@dataclass(frozen=True)
class Process:
    """A process, which is told from a later one with its id by when it started."""

    pid: int
    start: str

    def is_running(self) -> bool:
        return _start_time(self.pid) == self.start

    def wait(self) -> None:
        """Block until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.is_running():
                    select.select([descriptor], [], [])
            finally:
                os.close(descriptor)


def _here() -> tuple[str, str]:
    """The machine's boot and this process's namespace of process ids, as in names of runs."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    first, second = (hashlib.sha256(text.encode()).hexdigest()[:8] for text in (boot, namespace))
    return first, second


def _start_time(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty if it has ended."""
    try:
        # The name before it, in brackets, may contain anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def docker(
    *arguments: str, check: bool = False, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """`docker` with these arguments; blocks until it has ended. With `check`, RuntimeError unless
    it ended well; after `timeout` seconds, subprocess.TimeoutExpired."""
    ran = subprocess.run(
        ["docker", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if check and ran.returncode != 0:
        raise RuntimeError(f"docker {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran


def _list(kind: str, label: str, *options: str) -> str:
    every = ["--all"] if kind == "container" else []
    return docker(kind, "ls", *every, "--filter", f"label={label}", *options).stdout


def _known_runs() -> set[str]:
    """Of which something is on the daemon or on this machine."""
    form = f'{{{{.Label "{LABEL}"}}}}'
    names = {name for kind in REMOVAL for name in _list(kind, LABEL, "--format", form).split()}
    names |= {path.name for path in ROOT.iterdir()}
    return {name for name in names if NAME.fullmatch(name)}


if __name__ == "__main__":
    Run(sys.argv[1]).watch()
