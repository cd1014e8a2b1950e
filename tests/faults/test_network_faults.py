"""Everything that can go wrong between the connector and a bucket, with threads that set and get.

Each case ends with: no wrong byte, no exception into the caller, no call longer than its deadline,
storage works again without a restart, and descriptors, threads and staging are back where they
were. `storage_load.Load` checks the first three all the time.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import pools
from fault_proxy import (
    Fault,
    FaultProxy,
    error_under_200,
    other_content,
    refuse,
    reset,
    slow,
    stall,
    status,
    truncate,
)
from held_up import held_up_since
from hicache_nixl.errors import StoreError
from object_connectors import connected
from s3_access import ADMIN, Identity, store_url
from s3_server import S3Address, S3Server
from storage_load import BATCH, Held, Load

DEADLINE_S = 1.0
FAULT_S = 1.5
RECOVERY_S = 30.0
CONNECTIONS = 40
"""What clients may keep open beyond those they had: as many as they have requests at once."""
THREADS = 8
"""Threads that may be left waiting for more work."""

Read, Write = ("GET", "HEAD"), ("PUT",)


@dataclass(frozen=True)
class Case:
    """Faults, and what they must lead to while they last."""

    name: str
    faults: tuple[Fault, ...]
    reads: bool | None = False
    """Pages can still be read; None where it depends."""
    stores: bool | None = False
    """Pages can still be stored."""
    loses: bool = False
    """What is read seems to be damaged, so that pages may have to be stored once more."""
    staging: str = "4MiB"
    deadline_s: float = DEADLINE_S


CASES = [
    Case("refused", (refuse(),)),
    Case("reset before the server sees it", (reset("request"),)),
    Case("reset before the answer", (reset("header"),)),
    Case("reset within the answer", (reset("body"),)),
    Case("stalled before the server sees it", (stall("request"),)),
    Case("stalled before the answer", (stall("header"),)),
    Case("stalled within the answer", (stall("body"),)),
    Case("stalled within the answer, little staging", (stall("body"),), staging="1MiB"),
    Case("stalled reads only", (stall("body", methods=("GET",)),), stores=True),
    Case("stalled writes only", (stall("request", methods=Write),), reads=True),
    Case("byte by byte", (slow(1, 0.02),)),
    Case(
        "slow but in time",
        (slow(16_384, 0.05, methods=Read),),
        reads=True,
        stores=True,
        deadline_s=5.0,
    ),
    Case("short bodies", (truncate(announced=True, methods=("GET",)),), stores=True, loses=True),
    Case("bodies that break off", (truncate(announced=False, methods=("GET",)),), stores=True),
    Case("500", (status(500),)),
    Case("503", (status(503),)),
    Case("429", (status(429),)),
    Case("403", (status(403),)),
    Case("404, no such bucket", (status(404),)),
    Case("503 for a third", (status(503, share=0.33),), reads=True, stores=True),
    Case("403 for writes", (status(403, methods=Write),), reads=True),
    Case("error document under 200", (error_under_200(methods=("GET",)),), stores=True, loses=True),
    Case(
        "another body of that length",
        (other_content("html", methods=("GET",)),),
        stores=True,
        loses=True,
    ),
    Case("one bit flipped", (other_content("bit", methods=("GET",)),), stores=True, loses=True),
    Case(
        "some of everything",
        (
            reset("body", share=0.1),
            stall("body", share=0.05),
            status(503, share=0.1),
            truncate(announced=True, share=0.1, methods=("GET",)),
            other_content("bit", share=0.1, methods=("GET",)),
            reset("request", share=0.1),
        ),
        reads=None,
        stores=None,
        loses=True,
    ),
]


@pytest.fixture
def proxy(s3: S3Address) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as proxy:
        yield proxy


def quiet(load: Load) -> bool:
    """Whether nothing of any call is left."""
    tier = load.connector._tier
    return (
        tier.staging.in_use_bytes == 0
        and tier.reader.late_transfers + tier.writer.late_transfers == 0
        and tier.guard.state().stuck_threads == 0
    )


def settled(load: Load) -> bool:
    """Whether, besides, storage is in use."""
    state = load.connector._tier.guard.state()
    return quiet(load) and state.read.state == state.write.state == "closed"


def suspended(load: Load) -> bool:
    """Whether calls of either kind are misses at once."""
    state = load.connector._tier.guard.state()
    return "closed" not in (state.read.state, state.write.state)


def warm_up(load: Load) -> Held:
    """Run the load while all is well; what the process holds then."""
    end = time.monotonic() + 60
    while not (load.counts["stored"] > 5 * BATCH and load.counts["read"] > 5 * BATCH):
        load.run(0.3)
        assert time.monotonic() < end, "too little happens"
    load.wait_until("rest after the warm-up", lambda: settled(load), 30)
    return Held.now()


def there(load: Load, group: int) -> bool:
    """Whether every page of a group is."""
    return load.exists(group) == BATCH and all(load.get(group))


def check_recovered(load: Load, before: Held, took_s: float) -> None:
    """What was stored is there, and the process holds no more than before."""
    load.check()
    assert took_s < RECOVERY_S
    # A call that began in the fault may have ended since, and have opened a circuit.
    load.wait_works(RECOVERY_S)
    for group in sorted(load.stored):
        load.wait_until(f"{group} is there", lambda it=group: there(load, it), RECOVERY_S)
    load.wait_until("rest after the recovery", lambda: settled(load), 30)
    load.check()
    check_back(before)


def check_back(before: Held) -> None:
    """The process holds no more than before, after some time."""
    end = time.monotonic() + 30
    while more := _more(before, Held.now()):
        assert time.monotonic() < end, f"still held: {more}"
        time.sleep(0.2)


def _more(before: Held, now: Held) -> list[str]:
    """What the process holds beyond what it held."""
    found = [f"{count} times {path}" for path, count in (now.files - before.files).items()]
    if now.connections > before.connections + CONNECTIONS:
        found.append(f"{now.connections} connections, {before.connections} before")
    if now.threads.total() > before.threads.total() + THREADS:
        found.append(f"threads {now.threads - before.threads}")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_faults_of_the_network(proxy: FaultProxy, module_bucket: str, case: Case) -> None:
    """Whatever the network does: right pages or misses, in time, and it recovers by itself."""
    url = store_url(proxy.endpoint, module_bucket, "/".join(("faults", str(CASES.index(case)))))
    with connected(url, deadline_s=case.deadline_s, staging=case.staging) as load:
        before = warm_up(load)
        proxy.forget()
        with load.running():
            proxy.set(*case.faults)
            time.sleep(DEADLINE_S + 0.3)  # longer than most calls take
            counts = load.count_anew()
            time.sleep(FAULT_S)
            wanted = [
                what for what, go_on in (("read", case.reads), ("stored", case.stores)) if go_on
            ]
            load.wait_until(f"{wanted}", lambda: all(counts[what] for what in wanted), RECOVERY_S)
            met, moved = proxy.requests()["faults"], counts.copy()
            proxy.set()
            took_s = load.wait_works(RECOVERY_S)
        if case.loses:
            for group in sorted(load.stored):
                load.wait_until("stored", lambda it=group: all(load.set(it)), RECOVERY_S)
        check_recovered(load, before, took_s)
    assert met or case.faults[0].action == "refuse"
    assert case.reads in (None, bool(moved["read"]))
    assert case.stores in (None, bool(moved["stored"]))


def test_a_server_that_stops_answering_and_goes_on(own_s3: S3Server) -> None:
    """A server process that is stopped keeps its connections and says nothing; then it goes on."""
    url = store_url(own_s3.endpoint, own_s3.make_bucket(), "p")
    with connected(url, deadline_s=DEADLINE_S) as load:
        before = warm_up(load)
        with load.running():
            own_s3.pause()
            time.sleep(DEADLINE_S + FAULT_S)
            guard = load.connector._tier.guard
            load.wait_until("open", lambda: guard.state().read.state != "closed", 30)
            own_s3.resume()
            took_s = load.wait_works(RECOVERY_S)
        check_recovered(load, before, took_s)


def test_server_down_for_20_seconds(own_s3: S3Server) -> None:
    """Killed for 20 s: misses at once after the first failures, hits within 30 s of its return."""
    url = store_url(own_s3.endpoint, own_s3.make_bucket(), "p")
    with connected(url, deadline_s=DEADLINE_S) as load:
        before = warm_up(load)
        with load.running():
            own_s3.kill()
            end = time.monotonic() + 20
            guard = load.connector._tier.guard
            load.wait_until("both circuits are open", lambda: suspended(load), 10)
            before_that, begin, counts = guard.state(), time.monotonic(), load.count_anew()
            time.sleep(end - time.monotonic())
            calls, state = counts.copy(), guard.state()
            assert suspended(load)
            assert calls["read"] == calls["stored"] == 0
            # The threads write their pages between the calls; the calls themselves take no time.
            assert min(calls["get"], calls["set"]) > 100
            assert load.longest_s < DEADLINE_S + held_up_since(begin)
            skipped_reads = state.read.skipped - before_that.read.skipped
            assert skipped_reads >= calls["get"] + calls["exists"]
            assert state.write.skipped - before_that.write.skipped >= calls["set"]
            own_s3.restart()
            took_s = load.wait_works(RECOVERY_S)
        check_recovered(load, before, took_s)


def test_closing_amid_a_fault(proxy: FaultProxy, module_bucket: str) -> None:
    """A connector that is closed while transfers are late gives all back once they have ended."""
    url = store_url(proxy.endpoint, module_bucket, "closing")
    with connected(url, deadline_s=DEADLINE_S) as load:
        warm_up(load)
    before = Held.now()
    with connected(url, deadline_s=DEADLINE_S) as load:
        warm_up(load)
        proxy.set(stall("body"))
        load.run(DEADLINE_S + 0.3)
        begin = time.monotonic()
    assert time.monotonic() - begin < 60
    proxy.set()
    load.check()
    check_back(before)


def credentials_file(path: Path, identity: Identity) -> None:
    text = (
        f"[default]\naws_access_key_id = {identity.access_key}\n"
        f"aws_secret_access_key = {identity.secret_key}\n"
    )
    partial = path.with_suffix(".new")
    partial.write_text(text)
    partial.rename(path)


@pytest.mark.parametrize("server_first", [True, False])
def test_credentials_that_change_while_running(
    own_s3: S3Server, tmp_path: Path, server_first: bool
) -> None:
    """Keys are exchanged, on the server or in the file first: hits again without a restart."""
    url, path = store_url(own_s3.endpoint, own_s3.make_bucket(), "p"), tmp_path / "keys"
    credentials_file(path, ADMIN)
    with connected(url, None, deadline_s=DEADLINE_S, credentials_file=str(path)) as load:
        before = warm_up(load)
        for generation in range(2):
            identity = Identity(f"key-{generation}", f"another-secret-{generation}")
            with load.running():
                if not server_first:
                    credentials_file(path, identity)
                    time.sleep(FAULT_S)
                own_s3.rotate(identity)
                if server_first:
                    time.sleep(FAULT_S)
                    credentials_file(path, identity)
                took_s = load.wait_works(RECOVERY_S)
            check_recovered(load, before, took_s)


def test_a_certificate_of_another_authority(own_s3: S3Server) -> None:
    """Over TLS all works; another certificate is not trusted, until the right one is back."""
    url = store_url(own_s3.tls_endpoint, own_s3.make_bucket(), "p", ca_bundle=own_s3.ca_bundle)
    with connected(url, deadline_s=DEADLINE_S) as load:
        before = warm_up(load)
        with load.running():
            with own_s3.another_certificate():
                own_s3.restart()
                counts = load.count_anew()
                time.sleep(FAULT_S)
                assert counts["read"] == counts["stored"] == 0
            own_s3.restart()
            took_s = load.wait_works(RECOVERY_S)
        check_recovered(load, before, took_s)


WRONG_ENDPOINTS = {
    "no TLS there": ("https://127.0.0.1:{plain}", True, "TLS"),
    "unknown authority": ("https://127.0.0.1:{tls}", False, "ca_bundle"),
    "another name": ("https://localhost:{tls}", True, "name"),
    "TLS there": ("http://127.0.0.1:{tls}", False, "400"),
    "no such name": ("http://no-such-host.invalid:{plain}", False, "name|in time"),
    "nobody there": ("http://127.0.0.1:9", False, "refused"),
}
"""Endpoints that cannot serve: URL, whether the right CA is named, a word of the message."""


@pytest.fixture(scope="module")
def used_once(s3: S3Address, module_bucket: str) -> None:
    """What the clients of a process keep for good, this process has."""
    with connected(store_url(s3.endpoint, module_bucket, "once"), deadline_s=10.0) as load:
        assert load.set(0) == [True] * BATCH


@pytest.mark.usefixtures("used_once")
@pytest.mark.parametrize("what", WRONG_ENDPOINTS)
def test_wrong_endpoints_are_refused_at_start(s3: S3Address, module_bucket: str, what: str) -> None:
    """Starting ends soon, with one line that says what is wrong, and leaves nothing behind."""
    text, names_ca, word = WRONG_ENDPOINTS[what]
    parameters = {"ca_bundle": s3.ca_bundle} if names_ca else {}
    endpoint = text.format(plain=s3.port, tls=s3.tls_port)
    url = store_url(endpoint, module_bucket, "p", **parameters)
    before, begin = Held.now(), time.monotonic()
    with pytest.raises(StoreError, match=word) as refused, connected(url, deadline_s=5.0):
        pass
    assert time.monotonic() - begin < 5 + 5
    assert "\n" not in str(refused.value)
    assert ADMIN.secret_key not in str(refused.value)
    check_back(before)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_name_that_resolves_no_longer(
    s3: S3Address, module_bucket: str, tmp_path: Path, how: str
) -> None:
    """Names are not resolved for a while, at once or not in time: misses, then hits again."""
    unshare = ["unshare", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here, which it takes to change what names mean: be root")
    child = Path(__file__).with_name("name_child.py")
    given = {"port": s3.port, "bucket": module_bucket, "prefix": how, "directory": str(tmp_path)}
    ran = subprocess.run(
        [*unshare, sys.executable, str(child), how, json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]


# -- late bytes -----------------------------------------------------------------------------------


def test_a_read_that_stalls_for_a_minute(proxy: FaultProxy, module_bucket: str) -> None:
    """The server stalls 60 s in mid-read, deadline 2 s: False by then, and the host pages, used for
    something else, never change; what is late arrives in the end or not."""
    url = store_url(proxy.endpoint, module_bucket, "minute")
    with connected(url, deadline_s=2.0) as load:
        before = warm_up(load)
        proxy.set(stall("body", 60, methods=("GET",)))
        assert load.get(0) == [False] * BATCH
        # Bytes come after the call is over, and before the client has given up.
        time.sleep(1)
        proxy.set()
        took_s = load.wait_works(RECOVERY_S)
        check_recovered(load, before, took_s)
        # The client ends a body that stalls by itself, with an error, after 10 s at most.
        proxy.set(stall("body", 60, methods=("GET",)))
        assert load.get(0) == [False] * BATCH
        load.wait_until("an end of the late reads", lambda: quiet(load), 30)
        load.check()
        proxy.set()
        check_recovered(load, before, load.wait_works(RECOVERY_S))


def test_a_missing_key_among_slow_ones(proxy: FaultProxy, module_bucket: str) -> None:
    """64 reads from a slow server, the first key missing: the host pages are reused as soon as the
    call returns, and nothing changes in them."""
    url = store_url(proxy.endpoint, module_bucket, "missing")
    with connected(url, deadline_s=2.0, staging="16MiB") as load:
        before = warm_up(load)
        pool, connector = load.pool, load.connector
        keys = [f"{7:032x}{page:032x}" for page in range(64)]
        places = pools.token_indices(list(range(64)), pool.page_size)
        pools.fill(pool, 3)
        rest = places[pool.page_size :]
        load.wait_until("stored", lambda: all(connector.batch_set_v1(keys[1:], rest)), 30)
        proxy.set(slow(8_192, 0.2, methods=("GET",)))
        flags = connector.batch_get_v1(keys, places)
        assert flags[0] is False
        pools.fill(pool, 4)
        reused = [pools.page_bytes(pool, page) for page in range(64)]
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert [pools.page_bytes(pool, page) for page in range(64)] == reused
        proxy.set()
        load.wait_until("an end of the late reads", lambda: quiet(load), 30)
        assert [pools.page_bytes(pool, page) for page in range(64)] == reused
        check_back(before)


def test_quarantine_that_eats_all_staging(proxy: FaultProxy, module_bucket: str) -> None:
    """Late transfers hold all staging: further calls are misses in time; then it all comes back."""
    url = store_url(proxy.endpoint, module_bucket, "staging")
    # The circuits stay out of it: a call is over before it counts as having moved nothing.
    with connected(url, deadline_s=2.0, staging="1MiB") as load:
        before = warm_up(load)
        proxy.set(stall("header", methods=("GET", "PUT")))
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda number: load.get(number, number), range(4)))
        assert results == [[False] * BATCH] * 4
        staging = load.connector._tier.staging
        assert staging.in_use_bytes > staging.nbytes // 2
        proxy.set()
        check_recovered(load, before, load.wait_works(RECOVERY_S))


# -- objects that are not what they were ----------------------------------------------------------


@pytest.mark.parametrize("change", ["half", "html", "empty", "gone", "another page", "bit"])
def test_objects_changed_behind_the_back(s3: S3Address, module_bucket: str, change: str) -> None:
    """An object cut short, replaced, swapped or gone is a miss, the pages before it are read, and
    a new set makes it right."""
    prefix = f"changed-{change.replace(' ', '-')}"
    with connected(store_url(s3.endpoint, module_bucket, prefix), deadline_s=10.0) as load:
        assert load.set(0) == [True] * BATCH
        assert load.set(1) == [True] * BATCH
        client = s3.client()
        names = {name[-64:]: name for name in s3.keys(module_bucket, prefix)}
        name, other = (names[load.keys(group)[3]] for group in (0, 1))
        whole = client.get_object(Bucket=module_bucket, Key=name)["Body"].read()
        middle = len(whole) // 2
        if change == "gone":
            client.delete_object(Bucket=module_bucket, Key=name)
        elif change == "another page":
            source = {"Bucket": module_bucket, "Key": other}
            client.copy_object(Bucket=module_bucket, Key=name, CopySource=source)
        else:
            body = {
                "half": whole[:middle],
                "html": (b"<html>" * len(whole))[: len(whole)],
                "empty": b"",
                "bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            }[change]
            client.put_object(Bucket=module_bucket, Key=name, Body=body)
        flags = load.get(0)
        assert flags[:4] == [True, True, True, False]
        assert load.get(1) == [True] * BATCH
        assert load.exists(0) in (3, BATCH)
        load.wait_until("a set makes it right", lambda: all(load.set(0)) and all(load.get(0)), 30)
