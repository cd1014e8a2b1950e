"""Keeps other threads out of native code when the interpreter ends.

A daemon thread that is inside of NIXL then would abort the process. So the thread that ends it
takes the locks under which NIXL is called, and keeps them. It does not wait for one that hangs.
"""

import atexit
import itertools
import os
import threading
import time
import weakref

_WAIT_S = 2.0
_locks: weakref.WeakValueDictionary[int, threading.RLock] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_lock() -> threading.RLock:
    """A lock that is taken at exit. Locks that are taken one in another are made in that order."""
    lock = threading.RLock()
    _locks[next(_numbers)] = lock
    return lock


@atexit.register
def _take_all() -> None:
    end = time.monotonic() + _WAIT_S
    for number in sorted(_locks):
        if (lock := _locks.get(number)) is not None:
            lock.acquire(timeout=max(0.0, end - time.monotonic()))


# A thread that held one at the fork does not exist in the child.
os.register_at_fork(after_in_child=_locks.clear)
