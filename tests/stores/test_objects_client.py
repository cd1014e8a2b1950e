"""What the client of a bucket says when the bucket is well, and when it is not."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fault_proxy import Fault, FaultProxy, refuse, reset, stall, status, truncate
from hicache_nixl.bucket import Bucket, CredentialSource, SecretText
from hicache_nixl.credentials import CredentialResolver, Credentials
from hicache_nixl.errors import StoreError
from hicache_nixl.stores import objects_client
from hicache_nixl.stores.objects_client import ObjectClient
from hicache_nixl.stores.objects_errors import RefusedError, error_of
from s3_access import ADMIN, READER, STRANGER, Identity
from s3_server import S3Address, bucket

MARKER = "marker"


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def open_client(
    place: Bucket,
    *,
    timeout_s: float = 10.0,
    resolver: CredentialResolver | None = None,
    on_change: Callable[[Credentials], object] = lambda _: None,
) -> Iterator[ObjectClient]:
    client = ObjectClient(
        place,
        resolver or CredentialResolver.of(place),
        timeout_s=timeout_s,
        marker=f"{place.root}{MARKER}",
        on_change=on_change,
    )
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def test_objects_come_back(s3: S3Address, module_bucket: str, prefix: str) -> None:
    """Written, looked at, read, listed and removed; odd characters in a name included."""
    names = [f"{prefix}/{name}" for name in ("a", "b c", "d+e%41", "f/g")]
    with open_client(bucket(s3, module_bucket, prefix)) as client:
        for i, name in enumerate(names):
            client.write(name, bytes(i), deadline=soon())
        assert client.sizes([*names, f"{prefix}/none"], deadline=soon()) == [0, 1, 2, 3, None]
        assert client.read(names[2], deadline=soon()) == bytes(2)
        assert client.read(f"{prefix}/none", deadline=soon()) is None
        listed = [each for some in client.listed(f"{prefix}/", deadline=soon()) for each in some]
        assert {each.name: each.nbytes for each in listed} == dict(
            zip(names, range(4), strict=True)
        )
        assert all(abs(each.modified_ns / 1e9 - time.time()) < 60 for each in listed)
        client.delete([*names, f"{prefix}/none"], deadline=soon())
        assert client.sizes(names, deadline=soon()) == [None] * 4
    assert s3.keys(module_bucket, f"{prefix}/") == []


def test_a_prefix_ends_at_its_slash(s3: S3Address, module_bucket: str, prefix: str) -> None:
    """What lies under a longer name is not listed."""
    with open_client(bucket(s3, module_bucket, prefix)) as client:
        client.write(f"{prefix}/a", b"", deadline=soon())
        client.write(f"{prefix}1/b", b"", deadline=soon())
        listed = [each for some in client.listed(f"{prefix}/", deadline=soon()) for each in some]
    assert [each.name for each in listed] == [f"{prefix}/a"]


def test_many_are_listed_and_removed_in_pages(
    s3: S3Address, module_bucket: str, prefix: str
) -> None:
    """More than one answer holds, removed while the listing goes on."""
    names = [f"{prefix}/{i:05}" for i in range(1100)]
    with open_client(bucket(s3, module_bucket, prefix)) as client:
        threads = [
            threading.Thread(
                target=lambda some: [client.write(n, b"x", deadline=soon(60)) for n in some],
                args=(names[i::8],),
            )
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pages = []
        for some in client.listed(f"{prefix}/", deadline=soon(60)):
            pages.append(len(some))
            client.delete([each.name for each in some], deadline=soon(60))
        assert sum(pages) == 1100
        assert len(pages) > 1
        assert list(client.listed(f"{prefix}/", deadline=soon())) == []


def test_a_listing_refused_in_the_middle_does_not_end(
    s3: S3Address, module_bucket: str, prefix: str, faulty: FaultProxy
) -> None:
    """With other credentials it goes on where it was; without, it is an error."""
    names = {f"{prefix}/{i:05}" for i in range(1100)}
    with (
        open_client(bucket(s3, module_bucket, prefix)) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda name: client.write(name, b"x", deadline=soon(60)), names))
    place = bucket(s3, module_bucket, prefix, endpoint=faulty.endpoint)
    second = status(403, methods=("GET",), matching="continuation-token")

    class Healing(Keys):
        def refresh(self) -> bool:
            faulty.set()
            return super().refresh()

    keys = Healing(READER)
    keys.identity = ADMIN
    faulty.set(second)
    with open_client(place, resolver=keys) as client:
        pages = list(client.listed(f"{prefix}/", deadline=soon(60)))
        assert {each.name for some in pages for each in some} == names
        assert sum(map(len, pages)) == len(names)
    faulty.set(second)
    with (
        open_client(place) as client,
        pytest.raises(RefusedError, match=r"refuses to list \(403 AccessDenied\)"),
    ):
        list(client.listed(f"{prefix}/", deadline=soon(60)))


def test_looks_that_fail_do_not_spoil_the_others(
    s3: S3Address, module_bucket: str, prefix: str, faulty: FaultProxy
) -> None:
    """A failed one is made once more; what stays unknown counts as not there, by the deadline."""
    place = bucket(s3, module_bucket, prefix, endpoint=faulty.endpoint)
    names = [f"{prefix}/{i}" for i in range(20)]
    with open_client(place) as client:
        for name in names:
            client.write(name, b"x", deadline=soon())
        faulty.set(status(503, methods=("HEAD",), share=0.5))
        told = [client.sizes(names, deadline=soon()).count(1) for _ in range(10)]
        assert sum(told) > 170  # about 150 without the second time
        for fault, seconds in (
            (status(503, methods=("HEAD",), matching="/7"), 10.0),
            (stall(matching="/7"), 4.0),
        ):
            faulty.set(fault)
            began = time.monotonic()
            assert client.sizes(names, deadline=soon(seconds)) == [*[1] * 7, None, *[1] * 12]
            assert time.monotonic() - began < seconds + 3.0
        faulty.set(status(403, methods=("HEAD",), matching="/7"))
        with pytest.raises(RefusedError):
            client.sizes(names, deadline=soon())


@pytest.mark.parametrize("operation", ["sizes", "read", "write", "delete", "listed"])
def test_a_missing_bucket_is_an_error(s3: S3Address, operation: str) -> None:
    """Not a missing object, whatever is asked."""
    with (
        open_client(bucket(s3, "no-such-bucket", "p")) as client,
        pytest.raises(
            StoreError, match=r"s3://no-such-bucket/p at http.*no bucket 'no-such-b.*cre"
        ),
    ):
        _ask(client, operation)


def test_that_the_bucket_is_there_is_asked_seldom(
    s3: S3Address, module_bucket: str, prefix: str, faulty: FaultProxy
) -> None:
    """One request beside the first look, none beside those that follow soon."""
    with open_client(bucket(s3, module_bucket, prefix, endpoint=faulty.endpoint)) as client:
        for _ in range(3):
            looked = client.sizes([f"{prefix}/x"] * 5, deadline=soon(), bucket_age_s=60.0)
            assert looked == [None] * 5
    assert faulty.requests() == {"HEAD": 15, "GET": 1}


@pytest.mark.parametrize("operation", ["sizes", "read", "write", "delete", "listed"])
def test_a_refusal_is_an_error(
    s3: S3Address, module_bucket: str, prefix: str, operation: str
) -> None:
    """It names the bucket and where the credentials come from, and no secret."""
    place = bucket(s3, module_bucket, prefix, identity=STRANGER)
    with open_client(place) as client, pytest.raises(RefusedError) as caught:
        _ask(client, operation)
    message = str(caught.value)
    assert module_bucket in message
    assert "keys in the settings" in message
    assert STRANGER.secret_key not in message
    assert STRANGER.access_key not in message


def test_rights_are_told_apart(s3: S3Address, module_bucket: str, prefix: str) -> None:
    """Who may read may not write."""
    with open_client(bucket(s3, module_bucket, prefix, identity=READER)) as client:
        assert client.sizes([f"{prefix}/x"], deadline=soon()) == [None]
        with pytest.raises(RefusedError, match=r"refuses to write \(403 AccessDenied\)"):
            client.write(f"{prefix}/x", b"", deadline=soon())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (refuse(), r"the connection is refused"),
        (reset("header"), r"it closed the connection"),
        (truncate(announced=False), r"it closed the connection"),
        (status(503), r"\(503 SlowDown\)"),
        (status(500), r"\(500 InternalError\)"),
        (status(429), r"\(429 TooManyRequests\)"),
        (status(404), r"there is no bucket"),
        (stall("header"), r"it does not answer in time"),
        (stall("body"), r"it does not answer in time"),
    ],
    ids=lambda value: value.action if isinstance(value, Fault) else "",
)
def test_trouble_is_an_error_in_time(
    s3: S3Address,
    module_bucket: str,
    prefix: str,
    faulty: FaultProxy,
    fault: Fault,
    message: str,
) -> None:
    """One line with what it means, by the deadline; afterwards the same client works."""
    place = bucket(s3, module_bucket, prefix, endpoint=faulty.endpoint)
    seconds = 1.0 if fault.action == "stall" else 10.0
    with open_client(place) as client:
        client.write(f"{prefix}/x", b"content", deadline=soon())
        faulty.set(fault)
        began = time.monotonic()
        with pytest.raises(StoreError, match=message) as caught:
            client.read(f"{prefix}/x", deadline=soon(seconds))
        assert time.monotonic() - began < seconds + 3.0
        assert "\n" not in str(caught.value)
        faulty.set()
        assert client.read(f"{prefix}/x", deadline=soon()) == b"content"


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://no-such-host.invalid:9000", r"its name cannot be resolved"),
        ("https://127.0.0.1:{port}", r"it does not speak TLS; use http://"),
        ("https://127.0.0.1:{tls_port}", r"signed by nobody known; name its CA as ca_bundle"),
        ("http://127.0.0.1:1", r"the connection is refused"),
    ],
    ids=["name", "no tls", "unknown CA", "port"],
)
def test_a_wrong_endpoint_says_what_is_wrong(s3: S3Address, endpoint: str, message: str) -> None:
    """Each way of being wrong, with the way out."""
    where = endpoint.format(port=s3.port, tls_port=s3.tls_port)
    with (
        open_client(bucket(s3, "name", "p", endpoint=where)) as client,
        pytest.raises(StoreError, match=message),
    ):
        client.read("p/x", deadline=soon())


def test_tls_with_a_ca_of_ones_own(s3: S3Address, module_bucket: str, prefix: str) -> None:
    """The CA bundle is all it takes; one that cannot be read is named."""
    place = bucket(s3, module_bucket, prefix, endpoint=s3.tls_endpoint, ca_bundle=s3.ca_bundle)
    with open_client(place) as client:
        assert client.read(f"{prefix}/x", deadline=soon()) is None
    place = bucket(s3, module_bucket, prefix, endpoint=s3.tls_endpoint, ca_bundle="/nowhere")
    with (
        open_client(place) as client,
        pytest.raises(StoreError, match=r"ca_bundle /nowhere cannot be read: No such file"),
    ):
        client.read(f"{prefix}/x", deadline=soon())


def test_the_environment_has_no_say(
    s3: S3Address, module_bucket: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials are those of the bucket alone, even where AWS_* says otherwise; no proxy is used,
    because NIXL uses none."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "ENDPOINT_URL"):
        monkeypatch.setenv(f"AWS_{name}", "http://127.0.0.1:1")
    with open_client(bucket(s3, module_bucket, prefix)) as client:
        assert client.read(f"{prefix}/x", deadline=soon()) is None


class Keys(CredentialResolver):
    """Credentials that a test changes."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(CredentialSource())
        self.identity = identity
        self.resolved = 0
        self._now = identity

    def current(self) -> Credentials:
        return Credentials(SecretText(self._now.access_key), SecretText(self._now.secret_key))

    def refresh(self) -> bool:
        self.resolved += 1
        before, self._now = self._now, self.identity
        return before != self._now


def test_credentials_that_change_are_noticed(
    s3: S3Address, module_bucket: str, prefix: str
) -> None:
    """A refusal resolves them again; the request that met it succeeds, and others are told."""
    keys, told = Keys(STRANGER), []
    place = bucket(s3, module_bucket, prefix)
    with open_client(place, resolver=keys, on_change=told.append) as client:
        assert client.credentials.access_key is not None
        keys.identity = ADMIN
        assert client.read(f"{prefix}/x", deadline=soon()) is None
    assert keys.resolved == 1
    assert told == [keys.current()]


def test_a_mounted_file_that_changes_is_taken_up(
    s3: S3Address, module_bucket: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the calls, before anything is refused."""
    monkeypatch.setattr(objects_client, "_LOOK_EVERY_S", 0.0)

    def mount(secret: str) -> None:
        (tmp_path / "draft").write_text(
            f"[default]\naws_access_key_id={ADMIN.access_key}\naws_secret_access_key={secret}\n"
        )
        (tmp_path / "draft").rename(tmp_path / "keys")

    mount(ADMIN.secret_key)
    source = CredentialSource(file=str(tmp_path / "keys"))
    place = replace(bucket(s3, module_bucket, prefix), credentials=source)
    told: list[Credentials] = []
    with open_client(place, on_change=told.append) as client:
        assert client.read(f"{prefix}/x", deadline=soon()) is None
        mount("another-secret")
        end = soon()
        while not told and time.monotonic() < end:
            with contextlib.suppress(RefusedError):
                client.read(f"{prefix}/x", deadline=soon())
            time.sleep(0.01)
    assert told[0].secret_key is not None
    assert told[0].secret_key.get_secret_value() == "another-secret"


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("400 Bad Request: <Code>ExpiredToken</Code>", True),
        ("400 Bad Request: ", True),
        ("400 Bad Request: <Code>InvalidRequest</Code>", False),
        ("401 Unauthorized: ", True),
        ("404 Not Found: <Code>NoSuchBucket</Code>", False),
        ("503 Slow Down: ", False),
    ],
)
def test_what_may_be_the_credentials_fault_is_told_apart(said: str, refused: bool) -> None:
    """AWS answers 400 when a session token has run out, and to a HEAD without saying so."""
    error = error_of(
        Exception(f"Server returned non-2xx status code: {said}"), Bucket("s3", "b", "p"), "read"
    )
    assert isinstance(error, RefusedError) == refused


def test_clocks_that_differ_are_named() -> None:
    """They are what is to be set right, not the credentials."""
    said = "Server returned non-2xx status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>"
    error = error_of(Exception(said), Bucket("s3", "b", "p"), "read")
    assert "(403 RequestTimeTooSkewed)" in str(error)
    assert "the clocks of this host and of the server differ too much" in str(error)


def test_missing_credentials_are_said_once(
    s3: S3Address, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Raised, and not logged besides."""
    place = Bucket(
        "s3", "b", "p", s3.endpoint, credentials=CredentialSource(file=str(tmp_path / "none"))
    )
    with open_client(place) as client:
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be read"):
                client.read("p/x", deadline=soon())
        for thread in threading.enumerate():
            if thread.name == "hicache-nixl-credentials":
                thread.join(5)
    assert not [record for record in caplog.records if record.name.startswith("hicache_nixl")]


@pytest.mark.parametrize("module", ["obstore.store", "botocore.session"])
def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    place = Bucket("s3", "b", "p")
    if module == "obstore.store":
        place = replace(place, credentials=CredentialSource(SecretText("AK"), SecretText("SK")))
    with (
        open_client(place) as client,
        pytest.raises(StoreError, match=r'need pip install "hicache-nixl\[objects\]"'),
    ):
        client.read("p/x", deadline=soon())


def test_credentials_that_stay_wrong_are_not_resolved_all_the_time(
    s3: S3Address, module_bucket: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolving may cost a request to somebody else: once in a while."""
    monkeypatch.setattr(objects_client, "_REFRESH_EVERY_S", 60.0)
    keys = Keys(STRANGER)
    with open_client(bucket(s3, module_bucket, prefix), resolver=keys) as client:
        for _ in range(5):
            with pytest.raises(RefusedError):
                client.read(f"{prefix}/x", deadline=soon())
    assert keys.resolved == 1


def test_a_closed_client_says_so(s3: S3Address, module_bucket: str, faulty: FaultProxy) -> None:
    """Who waits is told, who comes later too, and the thread is gone."""
    place = bucket(s3, module_bucket, "p", endpoint=faulty.endpoint)
    errors: list[Any] = []
    with open_client(place) as client:
        client.read("p/x", deadline=soon())
        faulty.set(stall())
        entered = threading.Event()

        def ask() -> None:
            entered.set()
            try:
                client.read("p/x", deadline=soon(60))
            except StoreError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        entered.wait()
        while faulty.requests()["faults"] == 0:
            time.sleep(0.01)
        client.close()
        client.close()
        thread.join(5)
        assert not thread.is_alive()
        with pytest.raises(StoreError, match="is closed"):
            client.read("p/x", deadline=soon())
    assert "is closed" in str(errors[0])
    assert not [t for t in threading.enumerate() if t.name == "hicache-nixl-objects"]


def test_nothing_starts_before_it_is_asked(s3: S3Address, tmp_path: Path) -> None:
    """Making a client costs no thread, no connection and no credentials."""
    place = Bucket(
        "s3", "b", "p", s3.endpoint, credentials=CredentialSource(file=str(tmp_path / "none"))
    )
    with open_client(place):
        assert not [t for t in threading.enumerate() if t.name == "hicache-nixl-objects"]


def _ask(client: ObjectClient, operation: str) -> None:
    if operation == "sizes":
        client.sizes(["p/x"], deadline=soon())
    elif operation == "read":
        client.read("p/x", deadline=soon())
    elif operation == "write":
        client.write("p/x", b"x", deadline=soon())
    elif operation == "delete":
        client.delete(["p/x", "p/y"], deadline=soon())
    else:
        list(client.listed("p/", deadline=soon()))
