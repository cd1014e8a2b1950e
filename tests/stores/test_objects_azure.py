"""The objects store on Azure Blob Storage, as far as Azurite, Microsoft's emulator, is like it.

Azurite is a program of npm, not of PyPI: `npm install -g azurite`.
"""

import base64
import datetime
import hashlib
import hmac
import http.client
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_nixl.bucket import Bucket, CredentialSource, SecretText
from hicache_nixl.errors import StoreError
from hicache_nixl.stores.objects_client import ObjectClient
from hicache_nixl.stores.objects_layout import Names
from objectstores import open_objects_tenant, open_store
from slabs import Tenant, chain_keys

ACCOUNT = "devstoreaccount1"
# Published by Microsoft for this emulator; it opens nothing else.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = shutil.which("azurite-blob")

pytestmark = pytest.mark.skipif(
    AZURITE is None, reason="azurite-blob is not installed: npm install -g azurite"
)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@dataclass(frozen=True)
class Azurite:
    """An emulator that answers on a port of 127.0.0.1."""

    port: int

    def connection_string(self, key: str = KEY, port: int | None = None) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};"
            f"BlobEndpoint=http://127.0.0.1:{port or self.port}/{ACCOUNT};"
        )

    def place(self, name: str, **other: str | int) -> Bucket:
        text = self.connection_string(**other)
        source = CredentialSource(connection_string=SecretText(text))
        return Bucket("azure", name, "some/prefix", credentials=source)

    def make_container(self, name: str) -> None:
        """Sign and send "Create Container", which obstore does not know."""
        now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        version = "2021-08-06"
        headers = f"x-ms-date:{now}\nx-ms-version:{version}\n"
        signed = "PUT" + 12 * "\n" + f"{headers}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(
            "PUT",
            f"/{ACCOUNT}/{name}?restype=container",
            headers={
                "x-ms-date": now,
                "x-ms-version": version,
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
                "Content-Length": "0",
            },
        )
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = tmp_path_factory.mktemp("azurite")
    command = [str(AZURITE), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    command += ["--location", str(directory), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(port, directory / "log")
        yield Azurite(port)
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(log.read_text(errors="replace"))


@pytest.fixture
def place(azurite: Azurite) -> Bucket:
    """A container of the test's own."""
    name = f"test-{secrets.token_hex(6)}"
    azurite.make_container(name)
    return azurite.place(name)


def spoil(tenant: Tenant, page_key: bytes, body: bytes) -> None:
    client: ObjectClient = tenant.store._client
    name = Names(tenant.store.bucket).page(tenant.namespace.digest, page_key)
    client.write(name, body, deadline=soon())


def test_pages_come_back(place: Bucket) -> None:
    """Through NIXL's AZURE_BLOB, found by another host, listed, checked and cleared."""
    keys = chain_keys("k", 48)
    with open_objects_tenant(place) as one, open_objects_tenant(place, seed=2) as two:
        assert "written, read and removed through NIXL" in one.store.prepare()
        assert two.exists(keys) == 0
        assert one.put(keys[:40]) == [True] * 40
        assert two.exists(keys) == 40
        assert two.get(keys) == [True] * 40 + [False] * 8
        assert two.put(keys[30:], prefix=keys[:30]) == [True] * 18
        for direction in ("read", "write"):
            one.store.check(direction, deadline=soon())
        assert [use.pages for use in one.store.namespaces()] == [48]
        assert [page.good for page in one.store.verify()] == [True] * 48
        assert one.store.clear(one.namespace.digest) == 48
        assert two.get(keys) == [False] * 48


@pytest.mark.parametrize("kind", ["half", "empty", "html"])
def test_a_damaged_page_is_a_miss_and_can_be_stored_again(place: Bucket, kind: str) -> None:
    """As on S3."""
    keys = chain_keys("k", 16)
    with open_objects_tenant(place) as tenant:
        assert all(tenant.put(keys))
        bodies = {"half": bytes(4096), "empty": b"", "html": b"<html>".ljust(8192)}
        spoil(tenant, keys[3], bodies[kind])
        assert tenant.get(keys)[:4] == [True, True, True, False]
        tenant.store._seen.forget(tenant.namespace.digest)
        assert not tenant.store.present(tenant.namespace.digest, keys)[3]
        assert all(tenant.put(keys))
        assert all(tenant.get(keys))


def test_trouble_is_an_error(azurite: Azurite, place: Bucket) -> None:
    """No container, a wrong key, nobody there: one line each, without the key."""
    wrong = base64.b64encode(b"another key, also of 64 bytes".ljust(64)).decode()
    for other, message in (
        (azurite.place("no-such-container"), r"no container 'no-such-container'"),
        (azurite.place(place.name, key=wrong), r"refuses to read \(403 AuthorizationFailure\)"),
        (azurite.place(place.name, port=1), r"the connection is refused"),
    ):
        with open_store(other) as store, pytest.raises(StoreError, match=message) as caught:
            store.prepare()
        assert wrong not in str(caught.value)
