"""What other processes do in tests of buckets: `python -m object_children FUNCTION ARGUMENTS`.

A `store` is a URL as in the settings; its credentials come from the environment.
"""

import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import slabs
from hicache_nixl.settings import load_settings
from objectstores import open_objects_tenant
from s3_server import S3Address, bucket

BATCH = 32
PAYLOAD = 256 * slabs.KIB


def say(value: object) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def use(
    server: dict[str, Any], name: str, prefix: str, seed: int, seconds: float, model: str
) -> None:
    """Put and get, own and shared chains, for some seconds and until pages were stored and read, on
    a slow machine, too; prints how many pages were stored and right."""
    chooser = random.Random(seed)
    right = stored = 0
    there = bucket(S3Address(**server), name, prefix)
    with open_objects_tenant(there, payload=32 * slabs.KIB, model=model) as tenant:
        end = time.monotonic() + seconds
        while time.monotonic() < end or not (stored and right):
            chain: Any = ("shared", chooser.randrange(6))
            if chooser.random() < 0.5:
                chain = ("own", seed, chooser.randrange(6))
            keys = slabs.chain_keys(chain, 32)
            if chooser.random() < 0.4:
                stored += sum(tenant.put(keys))
            else:
                tenant.exists(keys)
                right += sum(tenant.get(keys))
    say({"right": right, "stored": stored})


@contextlib.contextmanager
def opened(store: str) -> Iterator[slabs.Tenant]:
    """A user of a store that is made, as the connector makes it at its start."""
    place = load_settings({"store": store}).bucket
    assert place is not None
    with open_objects_tenant(place, payload=PAYLOAD) as tenant:
        tenant.store.prepare()
        yield tenant


def put_for_ever(store: str, seed: int) -> None:
    """Store chains, and say of each which pages are stored; ends with its process."""
    with opened(store) as tenant:
        for number in itertools.count():
            name = f"{seed}-{number}"
            say([name, tenant.put(slabs.chain_keys(name, BATCH))])


def put_chains(store: str, names: list[str]) -> None:
    """Store some chains; prints which pages are stored."""
    with opened(store) as tenant:
        say([tenant.put(slabs.chain_keys(name, BATCH)) for name in names])


def read_chains(store: str, names: list[str]) -> None:
    """Ask for some chains, read them and compare each byte; prints how many pages each seems to
    have, and which were read."""
    with opened(store) as tenant:
        chains = [slabs.chain_keys(name, BATCH) for name in names]
        say([[tenant.exists(keys), tenant.get(keys)] for keys in chains])


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
