"""What the engines of a bucket are built with, chosen from machine and way to it."""

import math
import os
import time
from dataclasses import dataclass, field

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver, Credentials
from hicache_nixl.stores.objects_client import ObjectClient
from hicache_nixl.stores.objects_layout import Names
from hicache_nixl.stores.objects_remote import PLUGINS, engine_parameters

_ROUND_TRIPS = 4
_LEAST, _MOST = 16, 64
_REQUESTS_A_SECOND = 3000
"""10 ms away 16 requests cost a quarter of the throughput of 32, and 48 gain nothing; on loopback 8
to 64 are the same."""


@dataclass(frozen=True)
class EnginePlan:
    """What each engine of a bucket is built with: `ObjectEngine(plan.plugin, plan.parameters)`."""

    bucket: Bucket
    plugin: str
    parameters: dict[str, str] = field(repr=False)
    """Holds secrets."""
    credentials: Credentials
    """What `parameters` hold of them."""
    threads: int
    round_trip_s: float
    note: str
    """One line for people: how many requests at once, and why."""

    def parameters_for(self, credentials: Credentials) -> dict[str, str]:
        """The same with other credentials."""
        return engine_parameters(self.bucket, credentials, self.threads)


def plan_engines(
    bucket: Bucket, resolver: CredentialResolver, *, timeout_s: float = 10.0
) -> EnginePlan:
    """Measures the round trip to the bucket and chooses. Blocks up to `timeout_s`.

    Raises StoreError where the server does not answer or refuses, or there are no credentials.
    That the bucket is missing is not noticed here.
    """
    names = Names(bucket)
    client = ObjectClient(bucket, resolver, timeout_s=timeout_s, marker=names.marker)
    try:
        round_trip_s = _round_trip(client, names.marker, time.monotonic() + timeout_s)
        credentials = client.credentials
    finally:
        client.close()
    threads = choose_threads(round_trip_s, len(os.sched_getaffinity(0)))
    note = f"{threads} requests at once: a round trip takes {round_trip_s * 1e3:.1f} ms"
    if given := dict(bucket.nixl).get("num_threads"):
        threads = int(given)
        note = f"{threads} requests at once, as set by num_threads"
    return EnginePlan(
        bucket,
        PLUGINS[bucket.kind],
        engine_parameters(bucket, credentials, threads),
        credentials,
        threads,
        round_trip_s,
        note,
    )


def choose_threads(round_trip_s: float, cores: int) -> int:
    """Requests that an engine has in flight, each on a thread that mostly waits."""
    waiting = round(round_trip_s * _REQUESTS_A_SECOND)
    return max(_LEAST, min(_MOST, 2 * cores + waiting))


def _round_trip(client: ObjectClient, name: str, deadline: float) -> float:
    """Seconds of the fastest of some requests; the first one connects."""
    times = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        client.sizes([name], deadline=deadline, bucket_age_s=math.inf)
        times.append(time.perf_counter() - began)
    return min(times)
