"""The objects store against a real S3 server, pages through NIXL."""

import itertools
import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fault_proxy import (
    Fault,
    FaultProxy,
    error_under_200,
    other_content,
    refuse,
    reset,
    stall,
    status,
    truncate,
)
from hicache_nixl import record
from hicache_nixl.bucket import Bucket, CredentialSource
from hicache_nixl.errors import RegistrationError, StoreError, StoreFormatError
from hicache_nixl.stores import objects, objects_client, objects_trial
from hicache_nixl.stores.base import StoreUse
from hicache_nixl.stores.objects_layout import Names
from objectstores import open_objects_tenant, open_store
from s3_access import ADMIN, READER, STRANGER, Identity
from s3_server import S3Address, S3Server, bucket
from slabs import KIB, Tenant, chain_keys, key, namespace

HTML = b"<html><body>Bad gateway</body></html>"


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def place(s3: S3Address, module_bucket: str, request: pytest.FixtureRequest) -> Bucket:
    """A prefix of the test's own."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return bucket(s3, module_bucket, f"stores/{name}")


@pytest.fixture
def far(s3: S3Address, place: Bucket, faulty: FaultProxy) -> Bucket:
    """The same through the proxy."""
    return bucket(s3, place.name, place.prefix, endpoint=faulty.endpoint)


def name_of(tenant: Tenant, page_key: bytes) -> str:
    return Names(tenant.store.bucket).page(tenant.namespace.digest, page_key)


def forget_seen(tenant: Tenant) -> None:
    tenant.store._seen.forget(tenant.namespace.digest)


# -- start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "a", "a/b"])
def test_a_bucket_is_tried_for_real(
    s3: S3Address, make_bucket: Callable[[], str], prefix: str
) -> None:
    """One line says so; only the marker stays. Again, and without NIXL, it says the same."""
    place = bucket(s3, make_bucket(), prefix)
    with open_store(place) as store:
        assert not store.is_made()
        verdict = store.prepare()
        assert store.is_made()
        assert f"{place}: an object was written, read and removed without NIXL" in verdict
    with open_objects_tenant(place) as tenant:
        assert "removed through NIXL, with keys in the settings" in tenant.store.prepare()
    names = [name for name in s3.keys(place.name) if "/namespaces/" not in f"/{name}"]
    assert names == [f"{place.root}store.json"]


def test_a_bucket_is_made_only_when_asked(s3: S3Address) -> None:
    """Else its absence is an error with the fix."""
    name = s3.make_bucket()
    s3.remove_bucket(name)
    place = bucket(s3, name, "p")
    try:
        with open_store(place) as store:
            with pytest.raises(StoreError, match=r"no bucket .*create_bucket"):
                store.prepare()
            assert "made; an object was written" in store.prepare(create_bucket=True)
            assert "made;" not in store.prepare(create_bucket=True)
    finally:
        s3.remove_bucket(name)


@pytest.mark.parametrize(
    ("identity", "message"),
    [(READER, r"refuses to write \(403 AccessDenied\)"), (STRANGER, r"refuses to read \(403")],
    ids=["read only", "unknown"],
)
def test_rights_are_tried(s3: S3Address, place: Bucket, identity: Identity, message: str) -> None:
    """A store that cannot be written, or not be read, is refused at start."""
    with open_store(place) as store:
        store.prepare()
    mine = bucket(s3, place.name, place.prefix, identity=identity)
    with open_store(mine) as store, pytest.raises(StoreError, match=message):
        store.prepare()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b'{"format": 2, "kind": "objects"}', StoreFormatError, r"format 2, this version reads 1"),
        (b'{"kind": "other"}', StoreError, r"store.json of something else; name another"),
        (b"no json", StoreError, r"store.json of something else; name another"),
        (b"[" * 100_000, StoreError, r"store.json of something else; name another"),
    ],
    ids=["later", "other", "text", "deep"],
)
def test_the_store_of_somebody_else_is_left_alone(
    s3: S3Address, place: Bucket, content: bytes, error: type[StoreError], message: str
) -> None:
    """By every way in, and nothing is changed."""
    s3.client().put_object(Bucket=place.name, Key=f"{place.root}store.json", Body=content)
    space = namespace(4 * KIB)
    with open_store(place) as store:
        for enter in (
            store.prepare,
            store.is_made,
            lambda: store.open_namespace(space),
            store.namespaces,
            lambda: store.clear(space.digest),
            lambda: list(store.verify()),
        ):
            with pytest.raises(error, match=message):
                enter()
    assert s3.keys(place.name, place.root) == [f"{place.root}store.json"]


# -- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "segments"),
    [(4 * KIB, 1), (3 * 1300, 3), (256 * KIB, 4)],
    ids=["4K", "odd", "256K"],
)
def test_pages_come_back(place: Bucket, payload: int, segments: int) -> None:
    """Byte by byte, also more than staging holds, and also for another host."""
    keys = chain_keys("k", 48)
    with (
        open_objects_tenant(place, payload=payload, segments=segments) as one,
        open_objects_tenant(place, payload=payload, segments=segments, seed=2) as two,
    ):
        assert two.exists(keys) == 0
        assert one.put(keys[:40]) == [True] * 40
        assert two.exists(keys) == 40
        assert two.get(keys) == [True] * 40 + [False] * 8
        assert two.store.present(two.namespace.digest, keys).tolist() == [True] * 40 + [False] * 8
        assert two.put(keys[30:], prefix=keys[:30]) == [True] * 18
        assert one.get(keys) == [True] * 48


def test_pages_come_back_over_tls(s3: S3Address, place: Bucket) -> None:
    """With a CA of one's own; without it NIXL is refused, as is the start."""
    keys = chain_keys("k", 8)
    tls = bucket(s3, place.name, place.prefix, endpoint=s3.tls_endpoint, ca_bundle=s3.ca_bundle)
    with open_objects_tenant(tls) as tenant:
        assert "through NIXL" in tenant.store.prepare()
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))
    with (
        pytest.raises(StoreError, match="name its CA as ca_bundle"),
        open_objects_tenant(bucket(s3, place.name, place.prefix, endpoint=s3.tls_endpoint)),
    ):
        pass


def test_objects_are_one_a_page_and_describe_themselves(s3: S3Address, place: Bucket) -> None:
    """Payload, trailer, depth and writer; the manifest lies beside them."""
    keys = chain_keys("k", 5)
    with open_objects_tenant(place, payload=4 * KIB) as tenant:
        assert all(tenant.put(keys[2:], prefix=keys[:2]))
        digest = tenant.namespace.digest
        names = [name_of(tenant, page_key) for page_key in keys[2:]]
    assert s3.keys(place.name, f"{place.root}pages/") == sorted(names)
    body = s3.client().get_object(Bucket=place.name, Key=names[1])["Body"].read()
    assert len(body) == record.record_bytes(4 * KIB)
    trailer = record.parse_trailer(np.frombuffer(body, np.uint8)[-record.TRAILER_BYTES :])
    assert trailer is not None
    assert (trailer.namespace, trailer.key, trailer.depth) == (digest, keys[3], 3)
    assert abs(trailer.written_ns / 1e9 - time.time()) < 60
    manifest = s3.client().get_object(
        Bucket=place.name, Key=f"{place.root}namespaces/{digest.hex()}.json"
    )
    assert json.load(manifest["Body"]) == tenant.namespace.manifest


def test_a_key_twice_in_a_call_is_one_page(place: Bucket) -> None:
    """It is written once, and reported for both."""
    keys = chain_keys("k", 3)
    with open_objects_tenant(place) as tenant:
        assert tenant.put([keys[0], keys[1], keys[0], keys[2]]) == [True] * 4
        assert tenant.readable(keys) == 3


def test_a_namespace_must_be_open(place: Bucket) -> None:
    """Nothing is done for one that is not."""
    with (
        open_objects_tenant(place) as tenant,
        pytest.raises(RegistrationError, match="is not open; call open_namespace"),
    ):
        tenant.store.exists(bytes(32), chain_keys("k", 1))


# -- requests ------------------------------------------------------------------------------------


def test_each_call_costs_what_it_must(
    far: Bucket, faulty: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh set: a request a page and one. A get: one a page. exists of 512: 64 at most, and
    none for what was seen lately. A set of what is there: a look a page."""
    monkeypatch.setitem(objects.ObjectsStore._look.__kwdefaults__, "bucket_age_s", 60.0)
    keys = chain_keys("k", 512)

    def cost(call: Callable[[], object]) -> dict[str, int]:
        faulty.forget()
        call()
        return {method: count for method, count in faulty.requests().items() if count}

    with open_objects_tenant(far, pages=512) as tenant:
        assert cost(lambda: tenant.put(keys)) == {"HEAD": 1, "PUT": 512}
        assert cost(lambda: tenant.exists(keys)) == {}
        assert cost(lambda: tenant.get(keys[:100])) == {"GET": 100}
        forget_seen(tenant)
        assert cost(lambda: tenant.exists(keys)) == {"HEAD": 32}
        forget_seen(tenant)
        assert cost(lambda: tenant.store.present(tenant.namespace.digest, keys)) == {"HEAD": 512}
        assert cost(lambda: tenant.put(keys[:50])) == {"HEAD": 50}
        mixed = keys[:200] + chain_keys("absent", 312)
        forget_seen(tenant)
        assert cost(lambda: tenant.exists(mixed))["HEAD"] <= 64
        assert tenant.exists(mixed) == 200


def test_absent_keys_are_asked_for_each_time(place: Bucket) -> None:
    """Nobody believes for a moment that a page is missing which another host has written."""
    keys = chain_keys("k", 64)
    with open_objects_tenant(place) as one, open_objects_tenant(place) as two:
        assert two.exists(keys) == 0
        assert all(one.put(keys))
        assert two.exists(keys) == 64


def test_512_keys_far_away_are_found_soon(far: Bucket, faulty: FaultProxy) -> None:
    """With 50 ms a round trip, a few of them, not hundreds."""
    keys = chain_keys("k", 512)
    with open_objects_tenant(far) as tenant:
        faulty.set_round_trip(0.050)
        try:
            for some in (keys, chain_keys("absent", 512)):
                began = time.monotonic()
                tenant.exists(some)
                assert time.monotonic() - began < 10.0  # one after the other takes 25 s
        finally:
            faulty.set_round_trip(0)


# -- damage --------------------------------------------------------------------------------------


def half(body: bytes) -> bytes:
    return body[: len(body) // 2]


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(body: bytes) -> bytes:
        return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]

    return flip


DAMAGE = {
    "half": half,
    "empty": lambda body: b"",
    "longer": lambda body: body + bytes(4096),
    "payload bit": flipped(1000),
    "trailer bit": flipped(-4000),
    "format bit": flipped(-record.TRAILER_BYTES + 9),
    "html": lambda body: HTML.ljust(len(body)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_page_is_a_miss_and_can_be_stored_again(
    s3: S3Address, place: Bucket, kind: str
) -> None:
    """The pages before it are read, those behind it may be, none is wrong; nobody but the store
    has to clean up."""
    keys = chain_keys("k", 64)
    with open_objects_tenant(place) as tenant:
        assert all(tenant.put(keys))
        name = name_of(tenant, keys[3])
        body = s3.client().get_object(Bucket=place.name, Key=name)["Body"].read()
        s3.client().put_object(Bucket=place.name, Key=name, Body=DAMAGE[kind](body))
        # Of what is too long, what belongs there is read.
        assert tenant.get(keys)[:4] == [True, True, True, kind == "longer"]
        forget_seen(tenant)
        assert not tenant.store.present(tenant.namespace.digest, keys)[3]
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_a_missing_page_is_a_miss(s3: S3Address, place: Bucket) -> None:
    """Alone, in the middle of others, or all of them; it is no trouble."""
    keys = chain_keys("k", 64)
    with open_objects_tenant(place) as tenant:
        assert tenant.get(keys) == [False] * 64
        assert all(tenant.put(keys))
        s3.client().delete_object(Bucket=place.name, Key=name_of(tenant, keys[3]))
        assert tenant.get(keys)[:4] == [True, True, True, False]
        assert tenant.get(keys[3:4]) == [False]


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_pages_that_come_and_go_are_misses(
    place: Bucket, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    """Pages that others write and clear again between two looks are no trouble; only what is there
    and cannot be read three times is."""
    keys = chain_keys("k", 4)
    with open_objects_tenant(place) as tenant, open_objects_tenant(place) as other:
        sizes, looks = tenant.store._client.sizes, itertools.count(1)

        def seen_and_gone(*arguments: Any, **options: Any) -> Any:
            assert all(other.put(keys))
            seen = sizes(*arguments, **options)
            if next(looks) <= gone:
                other.store.clear(other.namespace.digest)
            return seen

        monkeypatch.setattr(tenant.store._client, "sizes", seen_and_gone)
        if gone < 3:
            assert not any(tenant.get(keys))
            assert all(tenant.get(keys))
        else:
            with pytest.raises(StoreError, match="though the first is there; see NIXL's log"):
                tenant.get(keys)


def test_a_page_that_comes_late_is_a_miss(place: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that others wrote just after they were not there are no trouble."""
    keys = chain_keys("k", 4)
    with open_objects_tenant(place) as tenant, open_objects_tenant(place) as other:
        sizes = tenant.store._client.sizes

        def once_written(*arguments: Any, **options: Any) -> Any:
            assert all(other.put(keys))
            return sizes(*arguments, **options)

        monkeypatch.setattr(tenant.store._client, "sizes", once_written)
        assert not any(tenant.get(keys))
        assert all(tenant.get(keys))


def test_exists_and_get_agree_at_a_hole(s3: S3Address, place: Bucket) -> None:
    """512 pages stored but for page 200: whatever exists says, a read ends there."""
    keys = chain_keys("k", 512)
    with open_objects_tenant(place, pages=512) as tenant:
        assert all(tenant.put(keys[:200] + keys[201:]))
        forget_seen(tenant)
        assert tenant.exists(keys) in (200, 512)
        flags = tenant.get(keys)
        assert flags[:201] == [True] * 200 + [False]
        assert tenant.exists(keys[:201]) == 200
        assert tenant.put(keys[200:201], prefix=keys[:200]) == [True]
        assert tenant.get(keys) == [True] * 512


def test_pages_that_only_look_damaged_stay(far: Bucket, faulty: FaultProxy) -> None:
    """What garbles every answer on the way costs no stored page; meanwhile they count as missing,
    so that they would be written again."""
    keys = chain_keys("k", 8)
    with open_objects_tenant(far) as tenant:
        assert all(tenant.put(keys))
        faulty.set(other_content("bit", methods=("GET",)))
        assert not any(tenant.get(keys))
        assert tenant.exists(keys[:1]) == 0
        faulty.set()
        assert all(tenant.get(keys))
        assert tenant.exists(keys) == 8


def test_a_record_of_a_later_version_stays(s3: S3Address, place: Bucket) -> None:
    """It is a miss, and left to who can read it."""
    keys = chain_keys("k", 2)
    with open_objects_tenant(place) as tenant:
        assert all(tenant.put(keys))
        name = name_of(tenant, keys[1])
        body = bytearray(s3.client().get_object(Bucket=place.name, Key=name)["Body"].read())
        body[-record.TRAILER_BYTES + 8] = record.FORMAT_VERSION + 1
        trailer = bytes(body[-record.TRAILER_BYTES : -8])
        body[-8:] = record.payload_hash(trailer).to_bytes(8, "little")
        s3.client().put_object(Bucket=place.name, Key=name, Body=bytes(body))
        assert tenant.get(keys) == [True, False]
        assert [page.good for page in tenant.store.verify()].count(False) == 1
    assert s3.client().get_object(Bucket=place.name, Key=name)["Body"].read() == body


# -- trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (refuse(), "the connection is refused"),
        (reset(), "it closed the connection"),
        (status(403), r"refuses to \w+ \(403"),
        (status(404), "there is no bucket"),
        (status(503), r"\(503"),
        (stall(), "does not answer in time"),
    ],
    ids=["refuse", "reset", "403", "no bucket", "503", "stall"],
)
def test_trouble_with_all_pages_is_an_error(
    far: Bucket, faulty: FaultProxy, fault: Fault, message: str
) -> None:
    """By the deadline, with the reason; afterwards the same store works."""
    keys = chain_keys("k", 16)
    with open_objects_tenant(far) as tenant:
        assert all(tenant.put(keys[:8]))
        forget_seen(tenant)
        seconds = 1.5 if fault.action == "stall" else 10.0
        tenant.deadline_s = tenant.store._timeout_s = seconds
        faulty.set(fault)
        began = time.monotonic()
        for call in (
            lambda: tenant.get(keys[:8]),
            lambda: tenant.put(keys[8:]),
            lambda: tenant.exists(keys),
            lambda: tenant.store.present(tenant.namespace.digest, keys),
            lambda: tenant.store.check("read", deadline=soon(seconds)),
            lambda: tenant.store.check("write", deadline=soon(seconds)),
        ):
            tenant.store._client._seen_at = -math.inf
            with pytest.raises(StoreError, match=message):
                call()
        assert time.monotonic() - began < 6 * (seconds + 3.5)
        faulty.set()
        tenant.deadline_s = tenant.store._timeout_s = 10.0
        assert tenant.exists(keys) >= 8  # what was written without an answer may be there
        assert all(tenant.get(keys[:8]))
        assert all(tenant.put(keys))


@pytest.mark.parametrize(
    "fault",
    [
        truncate(announced=True, methods=("GET",)),
        error_under_200(methods=("GET",)),
        other_content("html", methods=("GET",)),
    ],
    ids=["short", "200 with error", "html"],
)
def test_an_answer_that_is_not_the_page_is_a_miss(
    far: Bucket, faulty: FaultProxy, fault: Fault
) -> None:
    """Said to be well by the server, and found out by trailer and checksum."""
    keys = chain_keys("k", 8)
    with open_objects_tenant(far) as tenant:
        assert all(tenant.put(keys))
        faulty.set(fault)
        assert tenant.get(keys) == [False] * 8
        faulty.set()
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_a_write_refused_beside_reads_that_work_is_an_error(s3: S3Address, place: Bucket) -> None:
    """Credentials that may only read."""
    keys = chain_keys("k", 4)
    with open_objects_tenant(place) as tenant:
        tenant.store.prepare()
        assert all(tenant.put(keys[:2]))
    mine = bucket(s3, place.name, place.prefix, identity=READER)
    with open_objects_tenant(mine) as tenant:
        assert tenant.get(keys) == [True, True, False, False]
        with pytest.raises(StoreError, match=r"refuses to write \(403 AccessDenied\)"):
            tenant.put(keys)
        tenant.store.check("read", deadline=soon())
        with pytest.raises(StoreError, match=r"refuses to write \(403 AccessDenied\)"):
            tenant.store.check("write", deadline=soon())


@pytest.mark.parametrize("by", ["check", "put"])
def test_an_emptied_bucket_gets_its_notes_again(
    s3: S3Address, place: Bucket, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Marker and manifests, by the check after trouble or in a while beside a put: others see the
    pages that come after."""
    keys = chain_keys("k", 4)
    with open_objects_tenant(place) as tenant, open_store(place) as plain:
        tenant.store.prepare()
        assert all(tenant.put(keys))
        for name in s3.keys(place.name, place.root):
            s3.client().delete_object(Bucket=place.name, Key=name)
        if by == "check":
            tenant.store.check("read", deadline=soon())
        else:
            monkeypatch.setattr(objects_trial, "_LOOK_EVERY_S", 0.0)
        assert all(tenant.put(keys))
        end = soon()
        while not plain.namespaces() and time.monotonic() < end:
            time.sleep(0.02)
        assert [use.pages for use in plain.namespaces()] == [4]
        assert all(page.good for page in plain.verify())
        assert plain.is_made()


def test_a_part_of_requests_that_fail_costs_no_call(far: Bucket, faulty: FaultProxy) -> None:
    """Looks that fail count as pages that are missing: those are written, and not read."""
    keys = chain_keys("k", 64)
    fail = (20, 30, 41, 63)
    with open_objects_tenant(far) as tenant:
        assert all(tenant.put(keys))
        faulty.set(*(status(503, methods=("HEAD",), matching=keys[i].hex()) for i in fail))
        forget_seen(tenant)
        flags = tenant.store.present(tenant.namespace.digest, keys).tolist()
        assert flags == [i not in fail for i in range(64)]
        forget_seen(tenant)
        assert tenant.exists(keys) == 20
        forget_seen(tenant)
        faulty.forget()
        assert all(tenant.put(keys))
        assert faulty.requests()["PUT"] == len(fail)
        faulty.set(status(503, methods=("HEAD",)))
        forget_seen(tenant)
        more = chain_keys("more", 8)
        assert all(tenant.put(more))
        with pytest.raises(StoreError, match=r"cannot read \(503\)"):
            tenant.exists(chain_keys("others", 8))
        faulty.set()
        assert all(tenant.get(keys + more))


def test_a_page_too_large_for_the_server_is_an_error(far: Bucket, faulty: FaultProxy) -> None:
    """It says that size is what matters."""
    keys = chain_keys("k", 4)
    with open_objects_tenant(far, payload=64 * KIB) as tenant:
        faulty.set(status(413, methods=("PUT",), above=32 * KIB))
        with pytest.raises(
            StoreError,
            match=r"write \(413 EntityTooLarge\).* an object of 69632 bytes is not taken, one of "
            "4096 is",
        ):
            tenant.put(keys)
        faulty.set()
        assert all(tenant.put(keys))


def test_a_check_leaves_nothing_behind(s3: S3Address, place: Bucket) -> None:
    """In either direction; a marker that went is written again."""
    with open_objects_tenant(place) as tenant, open_store(place) as plain:
        for store in (tenant.store, plain):
            s3.client().delete_object(Bucket=place.name, Key=f"{place.root}store.json")
            store.check("read", deadline=soon())
            store.check("write", deadline=soon())
            names = s3.keys(place.name, place.root)
            assert [name for name in names if "/namespaces/" not in name] == [
                f"{place.root}store.json"
            ]


def test_credentials_that_rotate_are_taken_up(
    own_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old keys are refused from one moment to the next; with the new ones in the mounted file a
    check, or a call and the one after it, are well again, reading and writing, without restart."""
    file = tmp_path / "keys"

    def mount(identity: Identity) -> None:
        (tmp_path / "draft").write_text(
            f"[default]\naws_access_key_id={identity.access_key}\n"
            f"aws_secret_access_key={identity.secret_key}\n"
        )
        (tmp_path / "draft").rename(file)

    monkeypatch.setattr(objects_client, "_REFRESH_EVERY_S", 0.1)
    mount(ADMIN)
    place = Bucket(
        "s3",
        own_s3.make_bucket(),
        "p",
        own_s3.endpoint,
        credentials=CredentialSource(file=str(file)),
    )
    keys = chain_keys("k", 24)
    with open_objects_tenant(place) as tenant:
        assert all(tenant.put(keys[:8]))
        first = Identity("rotated-1", "rotated-secret-1")
        own_s3.rotate(first)
        with pytest.raises(StoreError, match=r"refuses to read \(403.*file .*keys"):
            tenant.get(keys[:8])
        mount(first)
        time.sleep(0.2)  # credentials are not resolved all the time
        tenant.store.check("read", deadline=soon())
        tenant.store.check("write", deadline=soon())
        assert all(tenant.get(keys[:8]))
        assert all(tenant.put(keys[:16]))
        second = Identity("rotated-2", "rotated-secret-2")
        mount(second)
        own_s3.rotate(second)
        time.sleep(0.2)
        flags: list[bool] = []
        for _ in range(2):
            try:
                flags = tenant.put(keys)
            except StoreError:
                continue
        assert all(flags)
        assert all(tenant.get(keys))


# -- administration ------------------------------------------------------------------------------


def test_clear_takes_only_its_own(s3: S3Address, module_bucket: str) -> None:
    """Not another namespace, not a longer prefix, not what somebody else has put there."""
    keys = chain_keys("k", 12)
    places = [bucket(s3, module_bucket, prefix) for prefix in ("p", "p1", "p/q")]
    with ExitStack() as stack:
        tenants = [stack.enter_context(open_objects_tenant(place)) for place in places]
        other = stack.enter_context(open_objects_tenant(places[0], model="other"))
        for tenant in (*tenants, other):
            assert all(tenant.put(keys))
        foreign = f"{name_of(tenants[0], keys[0])[:-3]}.txt"
        s3.client().put_object(Bucket=module_bucket, Key=foreign, Body=b"")
        assert tenants[0].store.clear(tenants[0].namespace.digest) == 12
        assert tenants[0].exists(keys) == 0
        assert tenants[0].get(keys) == [False] * 12
        for tenant in (*tenants[1:], other):
            assert all(tenant.get(keys))
        assert s3.keys(module_bucket, foreign) == [foreign]
        assert all(tenants[0].put(keys))


def test_clear_keeps_its_deadline(far: Bucket, faulty: FaultProxy) -> None:
    """It says that not all went, and goes on when called again."""
    keys = chain_keys("k", 12)
    with open_objects_tenant(far) as tenant:
        assert all(tenant.put(keys))
        faulty.set(stall(methods=("POST", "DELETE")))
        with pytest.raises(StoreError, match="cannot delete: it does not answer in time"):
            tenant.store.clear(tenant.namespace.digest, deadline=soon(3.0))
        faulty.set()
        tenant.store.clear(tenant.namespace.digest)
        assert tenant.exists(keys) == 0


def test_what_is_stored_can_be_seen(s3: S3Address, place: Bucket) -> None:
    """Without NIXL: namespaces, pages, bytes, age; a manifest that is not right is passed over."""
    with ExitStack() as stack:
        for model, count in (("one", 3), ("two", 5)):
            tenant = stack.enter_context(open_objects_tenant(place, model=model))
            assert all(tenant.put(chain_keys("k", count)))
        for name, body in ((f"{'0' * 64}.json", b"{}"), ("readme.txt", b"hello")):
            s3.client().put_object(
                Bucket=place.name, Key=f"{place.root}namespaces/{name}", Body=body
            )
        store = stack.enter_context(open_store(place))
        uses = {str(use.namespace.manifest["model_name"]): use for use in store.namespaces()}
        assert {model: use.pages for model, use in uses.items()} == {"one": 3, "two": 5}
        assert uses["two"].record_bytes == 5 * record.record_bytes(4 * KIB)
        assert abs(uses["two"].newest_use_ns / 1e9 - time.time()) < 60
        assert store.use() == StoreUse(None, None, None, None)


def test_verify_finds_and_removes_what_is_damaged(s3: S3Address, place: Bucket) -> None:
    """Every page is read; the damaged ones are reported once, and gone then."""
    keys = chain_keys("k", 20)
    with open_objects_tenant(place) as tenant, open_store(place) as store:
        assert all(tenant.put(keys))
        for page_key in keys[:3]:
            s3.client().put_object(Bucket=place.name, Key=name_of(tenant, page_key), Body=HTML)
        checked = list(store.verify(tenant.namespace.digest))
        assert {page.key for page in checked if not page.good} == set(keys[:3])
        assert sum(page.good for page in checked) == 17
        assert all(page.good for page in store.verify())
        assert list(store.verify(key("no such namespace"))) == []


def test_a_closed_store_says_so(place: Bucket) -> None:
    """Closing twice is closing once."""
    with open_store(place) as store:
        store.prepare()
        store.close()
        with pytest.raises(StoreError, match="is closed"):
            store.namespaces()


def test_what_was_seen_is_believed_for_some_seconds(place: Bucket) -> None:
    """A page that another host has cleared may still be said to exist, and is then not read."""
    keys = chain_keys("k", 8)
    with open_objects_tenant(place) as one, open_objects_tenant(place) as two:
        assert all(one.put(keys))
        two.store.clear(two.namespace.digest)
        assert one.exists(keys) == 8
        assert one.get(keys) == [False] * 8
        assert one.exists(keys) == 0
    assert objects._SEEN_S <= 10
