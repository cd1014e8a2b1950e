"""Load on stores in one bucket: threads, processes. STRESS_SECONDS is how long each goes on."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest

from objectstores import open_objects_tenant
from s3_server import S3Address, bucket
from slabs import KIB, chain_keys, finish, in_threads, open_files, start_child

SECONDS = float(os.environ.get("STRESS_SECONDS", "8"))
PAYLOAD = 32 * KIB
BATCH = 32

pytestmark = pytest.mark.stress


def test_threads_on_the_same_and_on_other_keys_while_cleared(
    s3: S3Address, make_bucket: Callable[[], str]
) -> None:
    """Two threads set and get the same keys, two more others, another clears: no error, no wrong
    byte, no descriptor more, no staging left."""
    there = bucket(s3, make_bucket(), "stress")
    with open_objects_tenant(there, payload=PAYLOAD, pages=5 * BATCH) as tenant:
        read = stored = 0

        def work(number: int, rounds: int) -> None:
            nonlocal read, stored
            name = "same" if number < 2 else (number, rounds // 2 % 5)
            keys = chain_keys(name, BATCH)
            if (number + rounds) % 2:
                stored += sum(tenant.put(keys, at=BATCH * number))
            else:
                tenant.exists(keys)
                read += sum(tenant.get(keys, at=BATCH * number))

        for rounds in range(6):
            in_threads(lambda number, rounds=rounds: work(number, rounds), range(4))
        before = open_files()
        end = time.monotonic() + SECONDS

        def repeat(number: int) -> None:
            rounds = 0
            while time.monotonic() < end:
                if number == 4:
                    tenant.store.clear(tenant.namespace.digest)
                    time.sleep(0.2)
                else:
                    work(number, rounds)
                rounds += 1

        in_threads(repeat, range(5))
        assert read
        assert stored
        assert open_files() <= before + 40  # connections of one more request each
        assert tenant.mover.staging.in_use_bytes == 0
        # Nobody clears any more: all is there, to the last page.
        assert all(tenant.put(chain_keys("same", BATCH)))
        assert all(tenant.get(chain_keys("same", BATCH)))
        assert all(page.good for page in tenant.store.verify())
        tenant.store.clear(tenant.namespace.digest)
        assert [use.pages for use in tenant.store.namespaces()] == [0]


def test_processes_that_share_a_bucket(s3: S3Address, make_bucket: Callable[[], str]) -> None:
    """Two processes put and get the same prefixes, a third clears another model: no wrong byte, and
    in the end each page is right."""
    name = make_bucket()
    server = asdict(S3Address(s3.port, s3.tls_port, s3.ca_bundle))
    users = [
        start_child("use", server, name, "shared", seed, SECONDS, "model", module="object_children")
        for seed in range(2)
    ]
    with open_objects_tenant(bucket(s3, name, "shared"), payload=PAYLOAD, model="other") as other:
        while any(child.poll() is None for child in users):
            assert all(other.put(chain_keys("other", BATCH)))
            assert other.store.clear(other.namespace.digest) >= BATCH
            time.sleep(0.1)
    reports = [json.loads(finish(child, 60)) for child in users]
    assert all(report["stored"] and report["right"] for report in reports)
    with open_objects_tenant(bucket(s3, name, "shared"), payload=PAYLOAD) as tenant:
        assert all(page.good for page in tenant.store.verify())
        assert sum(use.pages for use in tenant.store.namespaces()) > 0
