"""What other processes do in store tests: `python -m slab_children FUNCTION ARGUMENTS`."""

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import slabs


def say(value: object) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def put_for_ever(directory: str, seed: int, capacity: int, options: dict[str, Any]) -> None:
    """Store batches of chains, and say so after each; ends with its process."""
    chooser = random.Random(seed)
    with slabs.open_tenant(Path(directory), capacity=capacity, **options) as tenant:
        while True:
            name = (seed, chooser.randrange(40))
            count = chooser.randrange(1, 65)
            tenant.put(slabs.chain_keys(name, count))
            say([name, count])


def put_chains(directory: str, names: Iterable[Any], count: int, options: dict[str, Any]) -> None:
    """Store some chains, without NIXL."""
    with slabs.open_plain(Path(directory), **options) as tenant:
        for name in names:
            tenant.put(slabs.chain_keys(name, count))


def read_chains(directory: str, names: Iterable[Any], count: int, options: dict[str, Any]) -> None:
    """Read some chains without NIXL and compare each byte; prints how many pages each had."""
    with slabs.open_plain(Path(directory), **options) as tenant:
        say([sum(tenant.get(slabs.chain_keys(name, count))) for name in names])


def check_after_crash(
    directory: str, told: list[tuple[list[Any], int]], capacity: int, options: dict[str, Any]
) -> None:
    """Check a store whose writers were killed; `told` is what `put_for_ever` said."""
    chains = [(tuple(name), count) for name, count in told]
    slabs.check_after_crash(Path(directory), chains, capacity, **options)


def find_owner(point: str) -> tuple[Any, str]:
    """What holds `point` (module:dotted name), and its name there."""
    module_name, _, name = point.partition(":")
    owner: Any = importlib.import_module(module_name)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def die(
    point: str, when: str, action: str, directories: list[str], options: dict[str, Any]
) -> None:
    """Carry out an action on a store, and exit where `point` (module:name) is called."""
    owner, attribute = find_owner(point)
    setattr(owner, attribute, _dying(getattr(owner, attribute), when))
    with slabs.open_plain([Path(name) for name in directories], **options) as tenant:
        if action == "put":
            for number in range(100):
                tenant.put(slabs.chain_keys(("new", number), 32))
        elif action == "clear":
            tenant.store.clear(tenant.namespace.digest)
    sys.exit("the point was not reached")


def _dying(function: Callable[..., Any], when: str) -> Callable[..., Any]:
    def dying(*arguments: Any, **named: Any) -> Any:
        if when == "after":
            function(*arguments, **named)
        os._exit(0)

    return dying


def use(directory: str, seed: int, calls: int, capacity: int, options: dict[str, Any]) -> None:
    """Put and get, own and shared chains; prints how many pages were right."""
    chooser = random.Random(seed)
    right = stored = 0
    with slabs.open_tenant(Path(directory), capacity=capacity, **options) as tenant:
        for _ in range(calls):
            name: Any = ("shared", chooser.randrange(6))
            if chooser.random() < 0.5:
                name = ("own", seed, chooser.randrange(6))
            keys = slabs.chain_keys(name, 64)
            if chooser.random() < 0.4:
                stored += sum(tenant.put(keys))
            else:
                right += sum(tenant.get(keys))
    say({"right": right, "stored": stored})


def clear_for(directory: str, seconds: float, options: dict[str, Any]) -> None:
    """Clear one namespace again and again."""
    end = time.monotonic() + seconds
    with slabs.open_plain(Path(directory), **options) as tenant:
        while time.monotonic() < end:
            tenant.store.clear(tenant.namespace.digest)
            time.sleep(0.05)


def shrink_for(directory: str, seconds: float, capacity: int, options: dict[str, Any]) -> None:
    """Open a store with a smaller budget again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with slabs.open_plain(Path(directory), capacity=capacity, **options):
            time.sleep(0.3)


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
