"""For how long this machine let processes wait: measured by one that only takes naps.

A process of its own, so that time in which the tests' process stops itself does not count.
"""

import atexit
import functools
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque

_NAP_S = 0.01
_REMEMBERED = 60_000
"""Naps that were too long; ten minutes of them."""
_lock = threading.Lock()


def held_up_since(begin: float) -> float:
    """By how many seconds naps since `begin`, of time.monotonic(), were too long; call `watch`
    before then."""
    stdin, stdout = watch().stdin, watch().stdout
    assert stdin is not None
    assert stdout is not None
    with _lock:
        stdin.write(f"{begin}\n")
        stdin.flush()
        return float(stdout.readline())


@functools.cache
def watch() -> subprocess.Popen[str]:
    """Start to measure; it ends with this process."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={},
    )
    atexit.register(process.kill)
    return process


def _measure() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    too_long: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
    last = time.monotonic()
    while True:
        asked, _, _ = select.select([sys.stdin], [], [], _NAP_S)
        now = time.monotonic()
        if now > last + _NAP_S:
            too_long.append((now, now - last - _NAP_S))
        last = now
        if asked:
            line = sys.stdin.readline()
            if not line:
                return
            begin = float(line)
            total = sum(min(by, end - begin) for end, by in too_long if end > begin)
            sys.stdout.write(f"{total}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _measure()
