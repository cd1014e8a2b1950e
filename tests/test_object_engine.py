"""Objects through an engine: an end for each, and agents that are replaced, retired and destroyed
in time. The agents are stand-ins; `test_object_moves.py` has a real server."""

import contextlib
import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fake_nixl import FakeBucket, Fate, fake_object_engine
from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.object_engine import MAX_RETIRED, ObjectEngine, ObjectTransfer
from hicache_nixl.record import ALIGNMENT
from hicache_nixl.registrations import Descriptors
from support import Bytes, address_of, aligned_array

HANGS = Fate("hang")


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def eventually(condition: Callable[[], bool]) -> bool:
    stop = soon()
    while not condition() and time.monotonic() < stop:
        time.sleep(0.002)
    return condition()


class Bench:
    """Some blocks of registered memory, and objects of one block."""

    def __init__(self, engine: ObjectEngine, blocks: int = 16) -> None:
        self.engine = engine
        self.memory = aligned_array(blocks * ALIGNMENT)
        self.registration = engine.register_memory(address_of(self.memory), self.memory.size)

    def block(self, number: int) -> Bytes:
        return self.memory[number * ALIGNMENT : (number + 1) * ALIGNMENT]

    def at(self, *numbers: int) -> Descriptors:
        start = address_of(self.memory)
        return np.array([(start + i * ALIGNMENT, ALIGNMENT, 0) for i in numbers], np.uint64)

    def read(self, names: Sequence[str], first: int = 0) -> ObjectTransfer:
        return self.engine.post("READ", self.at(*range(first, first + len(names))), names)

    def hang(self, name: str, block: int = 0) -> None:
        """Leave a read of an object in flight."""
        transfer = self.read([name], block)
        with pytest.raises(DeadlineExceededError):
            transfer.wait(0)
        transfer.abandon(lambda: None)


def content(number: int) -> bytes:
    return bytes([number]) * ALIGNMENT


def test_objects_are_written_and_read() -> None:
    """Bytes go to the object of that name and come back, each to its place."""
    bucket = FakeBucket()
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        for i in range(4):
            bench.block(i)[:] = i + 1
        bench.engine.post("WRITE", bench.at(0, 1, 2, 3), ["a", "b/c", "d", "é"]).wait(soon())
        assert bucket.objects == {
            name: content(i + 1) for i, name in enumerate(["a", "b/c", "d", "é"])
        }
        transfer = bench.read(["d", "a"], first=8)
        transfer.wait(soon())
        assert transfer.done.tolist() == [True, True]
        assert (bench.block(8).tobytes(), bench.block(9).tobytes()) == (content(3), content(1))


@pytest.mark.parametrize("trouble", ["raise", "err", "refuse"])
def test_each_object_has_an_end_of_its_own(trouble: str) -> None:
    """One that fails, one that is missing and one that hangs do not touch the others."""
    bucket = FakeBucket({name: content(i) for i, name in enumerate("abcde")})
    bucket.fates = {"b": [Fate(trouble)], "d": [HANGS]}
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        transfer = bench.read(["a", "b", "c", "d", "nope", "e"])
        with pytest.raises(DeadlineExceededError, match="1 of 6 objects did not move"):
            transfer.wait(soon(0.05))
        assert transfer.done.tolist() == [True, False, True, False, False, True]
        assert transfer.late.tolist() == [False, False, False, True, False, False]
        bucket.let_go()
        with pytest.raises(TransferError, match="2 of 6 objects did not move: the transfer "):
            transfer.wait(soon())
        assert transfer.done.tolist() == [True, False, True, True, False, True]
        for i in (0, 2, 3):
            assert bench.block(i).tobytes() == content(i)
        assert bench.block(5).tobytes() == content(4)


def test_names_are_known_to_nixl_only_while_their_transfer_lasts() -> None:
    """However many objects were moved, well, badly or late, none stays registered."""
    bucket = FakeBucket({"a": content(1)}, {"a": [Fate(), Fate("raise"), HANGS]})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        (agent,) = bucket.agents
        for _ in range(2):
            transfer = bench.read(["a"])
            assert len(agent.names) == 1
            with contextlib.suppress(TransferError):
                transfer.wait(soon())
            assert not agent.names
        with pytest.raises(TransferError, match="lies in no registration"):
            engine.post("READ", bench.at(99), ["a"])
        assert not agent.names
        bench.hang("a")
        assert len(agent.names) == 1
        bucket.let_go()
        assert eventually(lambda: not agent.names)


def test_what_is_late_ends_once_and_not_before_its_time() -> None:
    """`on_end` of an abandoned transfer is called when the last of its objects has ended."""
    bucket = FakeBucket({"a": content(1), "b": content(2)}, {"b": [HANGS]})
    ended = threading.Event()
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        transfer = bench.read(["a", "b"])
        with pytest.raises(DeadlineExceededError):
            transfer.wait(0)
        transfer.abandon(ended.set)
        assert engine.late_transfers == 1
        assert not ended.wait(0.05)
        bucket.let_go()
        assert ended.wait(30)
        assert bench.block(1).tobytes() == content(2)
        assert eventually(lambda: engine.late_transfers == 0)


# -- agents -------------------------------------------------------------------------------------


def test_a_late_transfer_costs_the_agent_its_place() -> None:
    """The next post gets a new agent; the old one is destroyed when its transfer has ended, and not
    before."""
    bucket = FakeBucket({"a": content(1), "b": content(2)}, {"a": [HANGS]})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        (first,) = bucket.agents
        bench.hang("a")
        bench.read(["b"], 1).wait(soon())
        assert (len(bucket.made), engine.retired_agents) == (2, 1)
        bench.read(["b"], 2).wait(soon())
        time.sleep(0.25)
        assert (len(bucket.made), engine.retired_agents) == (2, 1)
        assert [handle.state for handle in first.handles] == ["flying"]
        del first
        bucket.let_go()
        assert eventually(lambda: engine.retired_agents == 0)
        assert eventually(lambda: gc.collect() >= 0 and len(bucket.agents) == 1)
        assert bench.block(0).tobytes() == content(1)


def test_a_late_transfer_that_has_ended_costs_nothing() -> None:
    """An agent whose late transfers are over is not replaced."""
    bucket = FakeBucket({"a": content(1)}, {"a": [HANGS]})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        bench.hang("a")
        bucket.let_go()
        assert eventually(lambda: engine.late_transfers == 0)
        bench.read(["a"]).wait(soon())
        assert len(bucket.made) == 1


def test_there_is_a_limit_to_retired_agents() -> None:
    """Agents do not pile up: at the limit the one in use stays in use, and is replaced as soon as
    one of the others has gone."""
    bucket = FakeBucket({"a": content(1)}, {"a": [HANGS] * (MAX_RETIRED + 3)})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        for block in range(MAX_RETIRED + 3):
            bench.hang("a", block)
        assert (len(bucket.made), engine.retired_agents) == (MAX_RETIRED + 1, MAX_RETIRED)
        assert engine.late_transfers == MAX_RETIRED + 3
        bench.read(["a"], 10).wait(soon())
        bucket.let_go()
        assert eventually(lambda: engine.late_transfers == engine.retired_agents == 0)
        bench.read(["a"], 11).wait(soon())


def test_new_parameters_are_used_from_the_next_post_on() -> None:
    """What is in flight goes on with the old ones, and its agent goes when it has ended."""
    bucket = FakeBucket({"a": content(1)}, {"a": [HANGS]})
    with fake_object_engine(bucket, {"secret_key": "old"}) as engine:
        bench = Bench(engine)
        transfer = bench.read(["a"])
        engine.replace({"secret_key": "new", "num_threads": "7"})
        assert len(bucket.made) == 1
        bench.read(["a"], 1).wait(soon())
        bench.read(["a"], 1).wait(soon())
        assert [made["secret_key"] for made in bucket.made] == ["old", "new"]
        assert engine.requests == 7
        bucket.let_go()
        transfer.wait(soon())
        assert bench.block(0).tobytes() == content(1)
        assert eventually(lambda: engine.retired_agents == 0)


def test_memory_is_known_to_every_agent() -> None:
    """Registrations move along to new agents; what was deregistered is refused."""
    bucket = FakeBucket({"a": content(1)})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine, 4)
        engine.replace({})
        later = Bench(engine, 4)
        for place in (bench, later):
            place.read(["a"]).wait(soon())
        engine.deregister(bench.registration)
        engine.deregister(bench.registration)
        for _ in range(2):
            with pytest.raises(TransferError, match="lies in no registration"):
                bench.read(["a"])
            later.read(["a"]).wait(soon())
            engine.replace({})
        with pytest.raises(TransferError, match="overlaps"):
            engine.register_memory(address_of(later.memory), ALIGNMENT)


def test_a_new_agent_that_cannot_be_made_is_tried_again() -> None:
    """Until there is one, posts fail; nothing else is lost."""
    bucket = FakeBucket({"a": content(1)})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        engine.replace({})
        bucket.refuses = True
        for _ in range(2):
            with pytest.raises(TransferError, match="NIXL plug-in OBJ cannot start"):
                bench.read(["a"])
        bucket.refuses = False
        bench.read(["a"]).wait(soon())


def test_secrets_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an engine that cannot start nor one that works shows what it was given."""
    bucket = FakeBucket({"a": content(1)}, {"a": [Fate("raise"), HANGS]})
    caplog.set_level(logging.DEBUG)
    with fake_object_engine(bucket, {"secret_key": "hush-hush"}) as engine:
        bench = Bench(engine)
        with pytest.raises(TransferError) as failed:
            bench.read(["a"]).wait(soon())
        bench.hang("a")
        bench.read(["a"], 1).wait(soon())
        bucket.refuses = True
        engine.replace({"secret_key": "hush-hush"})
        with pytest.raises(TransferError, match="with secret_key cannot start") as refused:
            bench.read(["a"])
        shown = [repr(engine), repr(vars(bench)), str(failed.value), str(refused.value)]
        assert "hush-hush" not in "".join([*shown, caplog.text])


@pytest.mark.parametrize(
    ("parameters", "requests"), [({"num_threads": "24"}, 24), ({}, None), ({"x": "1"}, None)]
)
def test_how_many_requests_are_in_flight(parameters: dict[str, str], requests: int | None) -> None:
    """As many as the plug-in has threads."""
    with fake_object_engine(FakeBucket(), parameters) as engine:
        assert engine.requests == requests or (requests is None and engine.requests >= 1)


def test_azure_blobs_go_through_the_same_engine() -> None:
    """NIXL's AZURE_BLOB plug-in starts; where nobody answers its client tries for some seconds, and
    the transfers are late like those of any other."""
    account = "AccountName=account;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:9/account;"
    engine = ObjectEngine(
        "AZURE_BLOB",
        {
            "connection_string": f"DefaultEndpointsProtocol=http;{account}",
            "container_name": "cache",
            "num_threads": "2",
        },
    )
    bench = Bench(engine)
    for operation in ("READ", "WRITE"):
        transfer = engine.post("READ" if operation == "READ" else "WRITE", bench.at(0, 1), "ab")
        with pytest.raises(DeadlineExceededError):
            transfer.wait(soon(0.05))
        transfer.abandon(lambda: None)
    assert engine.retired_agents == 1
    assert engine.drain(wait_s=60)
    engine.close()
    assert not transfer.done.any()
    assert not transfer.late.any()


# -- the end ------------------------------------------------------------------------------------


def test_closing_destroys_only_what_is_idle() -> None:
    """With transfers in flight `drain` tells after its time and `close` does not wait; the agent is
    destroyed when they have ended. Nothing can be posted meanwhile."""
    bucket = FakeBucket({"a": content(1)}, {"a": [HANGS]})
    with fake_object_engine(bucket) as engine:
        bench = Bench(engine)
        bench.hang("a")
        start = time.monotonic()
        assert not engine.drain(wait_s=0.05)
        assert 0.05 <= time.monotonic() - start < 20
        engine.deregister(bench.registration)
        engine.close()
        engine.close()
        assert time.monotonic() - start < 20
        assert len(bucket.agents) == 1
        with pytest.raises(TransferError, match="the object engine is closed"):
            bench.read(["a"])
        bucket.let_go()
        assert engine.drain(wait_s=30)
        assert eventually(lambda: gc.collect() >= 0 and not bucket.agents)
        assert bench.block(0).tobytes() == content(1)


def test_threads_and_replacements_lose_nothing() -> None:
    """Eight threads read, some transfers hang for a while, the parameters change all the time: what
    is done is right, ids are never shared, no agent is destroyed early."""
    names = [f"object-{i}" for i in range(8)]
    bucket = FakeBucket({name: content(i + 1) for i, name in enumerate(names)})
    chance = random.Random(5)
    bucket.fates = {
        name: [Fate(delay=chance.choice([0, 0, 0.001, 0.1])) for _ in range(200)] for name in names
    }
    with fake_object_engine(bucket, {"num_threads": "4"}) as engine:
        stop = soon(1.0)

        def work(number: int) -> int:
            bench = Bench(engine)
            done = 0
            while time.monotonic() < stop:
                bench.memory[:] = 0
                transfer = bench.read(names)
                try:
                    transfer.wait(soon(0.02))
                except DeadlineExceededError:
                    ended = threading.Event()
                    transfer.abandon(ended.set)
                    assert ended.wait(30)
                for i in np.flatnonzero(transfer.done):
                    assert bench.block(int(i)).tobytes() == content(int(i) + 1)
                    done += 1
            return done

        with ThreadPoolExecutor(8) as pool:
            results = [pool.submit(work, number) for number in range(8)]
            while time.monotonic() < stop:
                engine.replace({"num_threads": "4"})
                time.sleep(0.01)
            assert min(result.result(timeout=60) for result in results) > 0
        assert len(bucket.made) > 2
        assert eventually(lambda: engine.retired_agents == 0)
