"""Threads behind the calls, whose lack must not fail a call. Must not know what they do."""

import logging
import threading
from collections.abc import Callable

from hicache_nixl.pace import Pace

logger = logging.getLogger(__name__)

_pace = Pace()


def start_daemon(target: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that runs `target`; None, with a line in the log now and then, where the system has
    none left."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if _pace.allows():
            logger.error("%s: %s; raise the limit of processes (ulimit -u)", name, error)
        return None
    return thread
