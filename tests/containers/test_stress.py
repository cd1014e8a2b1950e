"""Load on each store from containers: threads, several containers, eviction, `clear`.

STRESS_SECONDS is how long each test goes on; 600 makes it a soak.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from load_spec import Margin, Spec, State
from s3_access import ADMIN

from .conftest import TIMEOUT, StartConnector, StartLoad
from .harness import STORE, LoadContainer
from .s3_servers import S3Place, store_url

SECONDS = float(os.environ.get("STRESS_SECONDS", "15"))
pytestmark = [pytest.mark.docker, pytest.mark.stress, pytest.mark.timeout(SECONDS + TIMEOUT)]

MIB = 1 << 20
CAPACITY = 8 * MIB
"""Less than what a load stores in a second or two, so that something is evicted all the time."""
BUDGET = {"capacity": CAPACITY}
SETTINGS: dict[str, dict[str, Any]] = {"slab": BUDGET | {"segment": MIB}, "files": BUDGET, "s3": {}}
MOST_BYTES = {"slab": CAPACITY, "files": CAPACITY * 5 // 4, "s3": math.inf}
"""What a store may hold. The files store takes new pages to be spread evenly over its directories
until it has looked at these, and chance does not spread evenly what a load sets meanwhile: several
times as many pages as the 227 that have room."""
MARGIN = Margin(files=16, connections=40, threads=32, resident_bytes=64 * MIB)
"""Beyond what a load held after its first seconds."""


@dataclass(frozen=True)
class Place:
    """A store that every container of a test uses."""

    kind: str
    url: str
    reached: dict[str, Any] = field(default_factory=dict)
    """Volume, or network and identity."""

    def spec(self, **changes: Any) -> Spec:
        # Storage is well here: a call that takes so long hangs.
        return Spec(self.url, SETTINGS[self.kind], deadline_s=30.0, **changes)


@pytest.fixture(params=list(SETTINGS))
def place(request: pytest.FixtureRequest) -> Place:
    """An empty store of each kind."""
    kind = request.param
    if kind != "s3":
        volume = request.getfixturevalue("volume")
        return Place(kind, f"{kind}://{STORE}", {"volume": volume})
    server: S3Place = request.getfixturevalue("s3")
    url = store_url(request.getfixturevalue("bucket"), request.node.originalname)
    return Place(kind, url, {"network": server.network, "identity": ADMIN})


def keep_on(loads: Sequence[LoadContainer]) -> list[State]:
    """Let loads go on for SECONDS, and until each has met all it should; how they stood after the
    first quarter."""
    for load in loads:
        load.wait_moves()
    begin = time.monotonic()
    time.sleep(SECONDS / 4)
    before = [load.wait(lambda _: True) for load in loads]
    while time.monotonic() < begin + SECONDS:
        for load in loads:
            load.wait(lambda _: True)  # raises if it has failed
        time.sleep(0.5)
    for load in loads:
        load.wait(lambda now: now.evicted is None or now.evicted > 0)
        load.wait_moves()
    return before


def end(loads: Sequence[LoadContainer], before: Sequence[State]) -> None:
    """End loads, each of which must hold no more than it did."""
    for load in loads:
        load.ask_to_end()
    for load, state in zip(loads, before, strict=True):
        assert load.finish().held_more(state, MARGIN) == {}


def check_store(place: Place, start_connector_on: StartConnector) -> None:
    """What is left in the store is right, one model's, and within the budget."""
    connector = start_connector_on(place.url, **place.reached)
    (listed,) = connector.cli("ls")["namespaces"]
    assert listed["bytes"] <= MOST_BYTES[place.kind]
    (counts,) = connector.cli("verify").values()
    assert counts == {"good": listed["pages"], "damaged": 0}


def test_threads_on_the_same_and_on_other_keys(
    place: Place, start_load: StartLoad, start_connector_on: StartConnector
) -> None:
    """Four threads set and get the same 128 keys and two have others, while pages are evicted and
    cleared: no error, no wrong byte, and descriptors, threads and memory stay."""
    spec = place.spec(backups=2, prefetches=2, others=2, groups=16, clear_every_s=3.0)
    load = start_load(spec, **place.reached)
    before = keep_on([load])
    load.wait(lambda now: now.clears > 0)
    end([load], before)
    check_store(place, start_connector_on)


def test_containers_that_share_a_store(
    place: Place, start_load: StartLoad, start_connector_on: StartConnector
) -> None:
    """Two containers set and get the same keys of one store, one of them clears: no error, no wrong
    byte in either."""
    loads = [
        start_load(place.spec(clear_every_s=seconds), **place.reached) for seconds in (3.0, 0.0)
    ]
    before = keep_on(loads)
    end(loads, before)
    check_store(place, start_connector_on)
