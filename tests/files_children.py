"""What other processes do in files store tests: `python -m files_children FUNCTION ARGUMENTS`."""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import filestores
import slabs
from slab_children import find_owner, say


def put_for_ever(directory: str, seed: int, options: dict[str, Any]) -> None:
    """Store batches of chains, and say so after each; ends with its process."""
    chooser = random.Random(seed)
    with filestores.open_files_tenant(Path(directory), **options) as tenant:
        while True:
            name = (seed, chooser.randrange(40))
            count = chooser.randrange(1, 65)
            say([name, count, sum(tenant.put(slabs.chain_keys(name, count)))])


def use(directory: str, seed: int, calls: int, options: dict[str, Any]) -> None:
    """Put and get, own and shared chains; prints how many pages were stored and right."""
    chooser = random.Random(seed)
    right = stored = 0
    with filestores.open_files_tenant(Path(directory), **options) as tenant:
        for _ in range(calls):
            name: Any = ("shared", chooser.randrange(40))
            if chooser.random() < 0.5:
                name = ("own", seed, chooser.randrange(40))
            keys = slabs.chain_keys(name, 8)
            if chooser.random() < 0.4:
                stored += sum(tenant.put(keys))
            else:
                right += sum(tenant.get(keys))
    say({"right": right, "stored": stored})


def keep_open(directory: str, skew_s: float, options: dict[str, Any]) -> None:
    """Sweep a store for ever, with a wall clock that is wrong; says when it has begun."""
    wall, wall_ns = time.time, time.time_ns
    time.time = lambda: wall() + skew_s
    time.time_ns = lambda: wall_ns() + int(skew_s * 1e9)
    with filestores.open_plain_files(Path(directory), **options) as tenant:
        while not tenant.store._house._lease.held:
            time.sleep(0.01)
        say("sweeping")
        for line in sys.stdin:
            keys = slabs.chain_keys(json.loads(line), 20)
            say([sum(tenant.put(keys)), sum(tenant.get(keys))])


def die(point: str, when: str, directory: str, options: dict[str, Any]) -> None:
    """Put, and end at once where `point` (module:name) is called."""
    owner, name = find_owner(point)
    function = getattr(owner, name)

    def dying(*arguments: Any, **named: Any) -> Any:
        if when == "after":
            function(*arguments, **named)
        os._exit(0)

    with filestores.open_plain_files(Path(directory), **options) as tenant:
        setattr(owner, name, dying)
        tenant.put(slabs.chain_keys("new", 32))
    sys.exit("the point was not reached")


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
