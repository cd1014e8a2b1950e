"""The faults that the other tests inject are the faults they name, as a plain client sees them."""

import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

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
from s3_server import S3Address

BODY = bytes(range(256)) * 400
Get = Callable[..., tuple[int, bytes]]


@pytest.fixture
def get(proxy: FaultProxy, s3: S3Address, module_bucket: str) -> Iterator[Get]:
    """Reads one object."""
    s3.client().put_object(Bucket=module_bucket, Key="k", Body=BODY)
    url = s3.client(endpoint=proxy.endpoint).generate_presigned_url(
        "get_object", Params={"Bucket": module_bucket, "Key": "k"}
    )

    def get(patience: float = 30.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=patience)
        try:
            connection.request("GET", url.removeprefix(proxy.endpoint))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    yield get
    proxy.set()
    proxy.set_round_trip(0)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (refuse(), ConnectionRefusedError),
        (reset("request"), ConnectionResetError),
        (reset("header"), ConnectionResetError),
        (reset("body"), (ConnectionResetError, http.client.IncompleteRead)),
        (stall("request"), TimeoutError),
        (stall("header"), TimeoutError),
        (stall("body"), TimeoutError),
        (truncate(announced=False), http.client.IncompleteRead),
    ],
    ids=lambda value: f"{value.action}-{value.place}" if isinstance(value, Fault) else "",
)
def test_connection_faults(
    proxy: FaultProxy, get: Get, fault: Fault, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    """The client sees the connection fail in that way, and all is well afterwards."""
    proxy.set(fault)
    with pytest.raises(error):
        get(patience=0.5 if error is TimeoutError else 30.0)
    proxy.set()
    assert get() == (200, BODY)


@pytest.mark.parametrize("number", [403, 404, 429, 500, 503])
def test_error_documents(proxy: FaultProxy, get: Get, number: int) -> None:
    """An error status comes with an S3 error document, and the server is not asked."""
    proxy.set(status(number))
    answered, body = get()
    assert answered == number
    assert body.startswith(b"<?xml")
    assert b"<Error><Code>" in body


def test_wrong_bodies(proxy: FaultProxy, get: Get) -> None:
    """Bodies that are too short, something else, or one bit off come under status 200."""
    proxy.set(truncate(announced=True))
    assert get() == (200, BODY[: len(BODY) // 2])
    proxy.set(error_under_200())
    answered, body = get()
    assert (answered, b"<Error>" in body) == (200, True)
    proxy.set(other_content("html"))
    answered, body = get()
    assert (answered, len(body), body[:6]) == (200, len(BODY), b"<html>")
    proxy.set(other_content("bit"))
    answered, body = get()
    assert (answered, len(body)) == (200, len(BODY))
    assert sum(a != b for a, b in zip(body, BODY, strict=True)) == 1


def test_slow_answers_take_their_time(proxy: FaultProxy, get: Get) -> None:
    """A slow answer keeps coming, and is the right one; once the fault is off it comes at once."""
    proxy.set(slow(40_000, 0.1))
    begin = time.monotonic()
    assert get() == (200, BODY)
    assert time.monotonic() - begin >= 0.2
    proxy.set(slow(1, 0.05))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(get)
        time.sleep(0.2)
        assert not answer.done()
        proxy.set()
        assert answer.result() == (200, BODY)


def test_a_stall_ends_when_the_faults_change(proxy: FaultProxy, get: Get) -> None:
    """What was stalled goes on as if nothing had been."""
    proxy.set(stall("body"))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(get)
        time.sleep(0.2)
        assert not answer.done()
        proxy.set()
        assert answer.result() == (200, BODY)


def test_round_trip_is_a_lower_bound(proxy: FaultProxy, get: Get) -> None:
    """Every answer takes at least the round trip, many at once no longer than one."""
    proxy.set_round_trip(1.0)
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: get(), range(8)))
    assert answers == [(200, BODY)] * 8
    assert 1.0 <= time.monotonic() - begin < 7.0


def test_a_share_of_the_requests_is_chosen_by_seed(s3: S3Address, get: Get) -> None:
    """Faults meet the share, the methods and the targets they were given, the same each time."""
    met = []
    for _ in range(2):
        with FaultProxy(s3.port, seed=5) as proxy:
            proxy.set(status(503, share=0.5, methods=("GET",), matching="/some/"))
            seen = []
            for target in ["/some/key"] * 40 + ["/other/key"] * 4:
                connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
                connection.request("GET", target)
                seen.append(connection.getresponse().status)
                connection.close()
            met.append(seen)
            assert proxy.requests() == {"GET": 44, "faults": seen.count(503)}
    assert met[0] == met[1]
    assert 10 < met[0].count(503) < 30
    assert 503 not in met[0][40:]
