"""What happens to locks around native code when a process ends."""

import subprocess
import sys

import pytest

BEGIN = """
import os, sys, threading, time
from hicache_nixl import exit_gate
lock = exit_gate.new_lock()
"""

BUSY = """
def work():
    while True:
        with lock:
            time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""

HANGS = """
def hang():
    with lock:
        time.sleep(1000)
threading.Thread(target=hang, daemon=True).start()
time.sleep(0.05)
"""

TOLD = """
import atexit
def tell():
    got = []
    other = threading.Thread(target=lambda: got.append(lock.acquire(timeout=0.2)), daemon=True)
    other.start()
    other.join()
    os.write(1, b"in" if got == [True] else b"out")
atexit._clear()
atexit.register(tell)
atexit.register(exit_gate._take_all)
"""

FORKS = """
child = os.fork()
if child:
    sys.stdout.flush()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("code", "output"),
    [(BUSY + TOLD, "out"), (HANGS, ""), (HANGS + FORKS, "")],
    ids=["busy", "hangs", "forked"],
)
def test_a_process_ends(code: str, output: str) -> None:
    """At exit others are kept out of the lock; one that hangs inside, also in the parent of a
    forked process, holds nobody up."""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == output
    assert ended.stderr == ""
