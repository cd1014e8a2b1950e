"""The connector image on a bucket: commands, refusals, objects that changed, what a kill leaves."""

import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from load_spec import Spec
from object_children import BATCH, PAYLOAD
from s3_access import ADMIN, READER, STRANGER, Identity
from slabs import chain_keys

from .conftest import StartConnector, StartLoad
from .harness import ConnectorContainer, ContainerError
from .s3_servers import S3Place, store_url

pytestmark = pytest.mark.docker

RECORD = PAYLOAD + 4096
ALL, NONE = [True] * BATCH, [False] * BATCH
STAGING = ("--set", "staging=4MiB")

Start = Callable[..., ConnectorContainer]


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Where the store of this test is in the bucket of this module."""
    return re.sub(r"\W+", "-", request.node.name).strip("-")


@pytest.fixture
def start(s3: S3Place, bucket: str, prefix: str, start_connector_on: StartConnector) -> Start:
    """Start connector containers on that store: `start(*child)`."""
    url = store_url(bucket, prefix)
    return partial(start_connector_on, url, network=s3.network, identity=ADMIN)


def told(output: str) -> Any:
    """What a child printed last."""
    return json.loads(output.splitlines()[-1])


def test_commands(start: Start) -> None:
    """probe, ls, verify, lifecycle and clear do on a bucket what they say."""
    connector = start()
    found = {finding["topic"]: finding["found"] for finding in connector.cli("probe", *STAGING)}
    assert "written, read and removed through NIXL" in found["bucket"]
    assert told(connector.child("put_chains", connector.store, ["a", "b"])) == [ALL, ALL]
    (listed,) = connector.cli("ls")["namespaces"]
    assert (listed["pages"], listed["bytes"]) == (2 * BATCH, 2 * BATCH * RECORD)
    short = listed["digest"][:12]
    assert connector.cli("verify") == {short: {"good": 2 * BATCH, "damaged": 0}}
    assert connector.cli("lifecycle", "--expire-days", "3") == {"expire_days": 3}
    assert connector.cli("lifecycle", "--remove") == {"expire_days": None}
    assert connector.cli("clear", "--yes") == {short: 2 * BATCH}
    assert told(connector.child("read_chains", connector.store, ["a"])) == [[0, NONE]]


REFUSALS: dict[str, tuple[Identity, str, str]] = {
    "unknown key": (STRANGER, "", "credentials"),
    "wrong secret": (Identity(ADMIN.access_key, STRANGER.secret_key), "", "credentials"),
    "may only read": (READER, "", "credentials"),
    "no such bucket": (ADMIN, "no-such-bucket", "no-such-bucket"),
}
"""Who asks, for which bucket if not the module's, and a word of what is said."""


@pytest.mark.parametrize("case", REFUSALS)
def test_commands_that_are_refused(
    s3: S3Place, bucket: str, start_connector_on: StartConnector, case: str
) -> None:
    """What the server refuses is a status that is not 0, and one line that says what and no
    secret."""
    who, missing, word = REFUSALS[case]
    url = store_url(missing or bucket, "refused")
    connector = start_connector_on(url, network=s3.network, identity=who)
    refused = connector.call("hicache-nixl", "probe", "--store", url, *STAGING)
    assert refused.status == 1
    assert (refused.output, len(refused.error.splitlines())) == ("", 1), refused
    assert word in refused.error
    assert who.secret_key not in refused.error


def test_connector_that_is_refused(s3: S3Place, bucket: str, start_load: StartLoad) -> None:
    """A connector that may not write into its bucket ends at its start with a line that says why,
    which is in the harness's error."""
    load = start_load(Spec(store_url(bucket, "refused")), network=s3.network, identity=READER)
    with pytest.raises(ContainerError, match="ended with status 1") as caught:
        load.wait_moves()
    why = rf"^[\w.]+Error: s3://{bucket}/refused .* refuses to write"
    assert re.search(why, str(caught.value), re.MULTILINE)
    assert READER.secret_key not in load.log()


@pytest.mark.parametrize("change", ["half", "html"])
def test_objects_changed_behind_the_back(
    s3: S3Place, bucket: str, prefix: str, start: Start, change: str
) -> None:
    """An object cut to half, or replaced by an HTML page of its length, is a miss, and damage to
    `verify`."""
    connector = start()
    assert told(connector.child("put_chains", connector.store, ["a"])) == [ALL]
    page = chain_keys("a", BATCH)[3].hex()
    (name,) = (found for found in s3.keys(bucket, f"{prefix}/pages/") if found.endswith(page))
    client = s3.client()
    whole = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    assert len(whole) == RECORD
    body = {"half": whole[: RECORD // 2], "html": (b"<html>" * RECORD)[:RECORD]}[change]
    client.put_object(Bucket=bucket, Key=name, Body=body)
    ((_, read),) = told(connector.child("read_chains", connector.store, ["a"]))
    assert read[:4] == [True, True, True, False]
    verified = connector.call("hicache-nixl", "verify", "--store", connector.store)
    assert verified.status == 1
    assert verified.output.startswith(f"{BATCH - 1} pages are right, 1 were damaged")


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_in_the_middle_of_a_write(
    s3: S3Place, bucket: str, prefix: str, start: Start, seed: int
) -> None:
    """SIGKILL to a container that writes: another one reads every page that was told, byte for
    byte, and no object is there by halves."""
    chooser = random.Random(seed)
    reader = start()
    stored: dict[str, list[bool]] = {}
    for _ in range(2):
        writer = start("put_for_ever", reader.store, chooser.randrange(1 << 30))
        writer.wait_lines(chooser.randrange(1, 10), timeout=120)
        writer.kill()
        stored |= dict(json.loads(line) for line in writer.lines())
    assert ALL in stored.values()
    found = told(reader.child("read_chains", reader.store, list(stored)))
    for was_stored, (_, read) in zip(stored.values(), found, strict=True):
        assert not [page for page in range(BATCH) if was_stored[page] and not read[page]]
    assert [counts["damaged"] for counts in reader.cli("verify").values()] == [0]
    pages = s3.client().get_paginator("list_objects_v2").paginate
    listed = pages(Bucket=bucket, Prefix=f"{prefix}/pages/")
    assert {item["Size"] for page in listed for item in page["Contents"]} == {RECORD}
