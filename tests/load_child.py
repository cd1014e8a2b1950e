"""A load on one store in a process of its own, which says how it stands until it is told to end.

    python -m load_child JSON

JSON is the fields of `Spec`. Every half second one line of JSON, the fields of `State`; after
SIGTERM or SIGINT one more, and status 0. A wrong byte, an exception in a call or a call that is too
long is status 1 and a traceback.
"""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import storage_load
from connectors import config
from hicache_nixl import HiCacheNixlConnector
from load_spec import Spec, State

EVERY_S = 0.5


class Child:
    """The load, and what was counted beside it."""

    def __init__(self, spec: Spec, connector: Any, pool: Any) -> None:
        self.spec = spec
        self.connector = connector
        self.clears = 0
        self.ending = threading.Event()
        self.load = storage_load.Load(
            connector,
            pool,
            deadline_s=spec.deadline_s,
            groups=spec.groups,
            seed=spec.seed,
            backups=spec.backups,
            prefetches=spec.prefetches,
            others=spec.others,
        )

    def state(self) -> State:
        counts, held = self.load.counts, storage_load.Held.now()
        guard = self.connector._tier.guard.state()
        return State(
            sets=counts["set"],
            gets=counts["get"],
            stored=counts["stored"],
            read=counts["read"],
            clears=self.clears,
            longest_s=round(self.load.longest_s, 3),
            files=sum(held.files.values()),
            connections=held.connections,
            threads=sum(held.threads.values()),
            resident_bytes=held.resident_bytes,
            evicted=self.connector._tier.store.use().evicted_pages,
            circuits={"read": guard.read.state, "write": guard.write.state},
        )

    def say(self) -> None:
        sys.stdout.write(json.dumps(asdict(self.state())) + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        """Until the signal; raises what went wrong as soon as it did."""
        cleared_at = time.monotonic()
        with self.load.running():
            while not self.ending.wait(EVERY_S):
                self.say()
                self.load.raise_error()
                if 0 < self.spec.clear_every_s < time.monotonic() - cleared_at:
                    self.clears += self.connector.clear()
                    cleared_at = time.monotonic()
        self.load.check()
        self.say()


@contextlib.contextmanager
def child(spec: Spec) -> Iterator[Child]:
    """A connector with a pool and its load; closed at the end."""
    pages = storage_load.pages_for(spec.backups + spec.prefetches + spec.others)
    pool = storage_load.make_pool(pages=pages)
    settings = {"deadline": spec.deadline_s, **spec.settings}
    given = config(Path("/unused"), store=spec.store, **settings)
    if "capacity" not in spec.settings:
        del given.extra_config["capacity"]
    connector = HiCacheNixlConnector(given, {})
    try:
        connector.register_mem_pool_host(pool)
        connector.on_host_pools_registered()
        yield Child(spec, connector, pool)
    finally:
        connector.close()


def main() -> None:
    with child(Spec(**json.loads(sys.argv[1]))) as load:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: load.ending.set())
        load.run()


if __name__ == "__main__":
    main()
