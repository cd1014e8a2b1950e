"""Small objects through NIXL: what is late keeps its memory, and does not stop the next one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.stores import objects_probe
from hicache_nixl.stores.objects_probe import NBYTES, Prober


class LateTransfer:
    """Does not end before the test says so."""

    def __init__(self) -> None:
        self.end: Callable[[], None] | None = None

    def wait(self, deadline: float) -> None:
        raise DeadlineExceededError("late")

    def abandon(self, on_end: Callable[[], None]) -> None:
        self.end = on_end


class Engine:
    """What a prober needs of one; transfers are late, or end at once if `well`."""

    def __init__(self) -> None:
        self.well = False
        self.late: list[LateTransfer] = []
        self.addresses: list[int] = []
        self.registered: list[tuple[int, int]] = []

    def register_memory(self, address: int, nbytes: int) -> tuple[int, int]:
        self.registered.append((address, nbytes))
        return address, nbytes

    def deregister(self, registration: tuple[int, int]) -> None:
        self.registered.remove(registration)

    def post(self, operation: str, memory: np.ndarray, names: Sequence[str]) -> Any:
        self.addresses.append(int(memory[0, 0]))
        transfer = LateTransfer()
        if self.well:
            transfer.wait = lambda deadline: None
        else:
            self.late.append(transfer)
        return transfer


def test_late_probes_keep_their_memory() -> None:
    """Each has a place of its own until it ends; when there is no place left, the next is refused;
    when one has ended, its place is used again."""
    reader, writer = Engine(), Engine()
    prober = Prober(reader, writer)
    for _ in range(8):
        with pytest.raises(DeadlineExceededError):
            prober.read("name", deadline=0.0)
    assert len(set(reader.addresses)) == 8
    with pytest.raises(TransferError, match="8 probes are late and have not ended yet"):
        prober.write("name", bytes(NBYTES), deadline=0.0)
    reader.late[3].end()
    writer.well = True
    prober.write("name", bytes(NBYTES), deadline=0.0)
    prober.write("name", bytes(NBYTES), deadline=0.0)
    assert set(writer.addresses) == {reader.addresses[3]}
    ((start, nbytes),) = reader.registered
    assert all(start <= at <= start + nbytes - NBYTES for at in reader.addresses)


@pytest.mark.parametrize("late", [False, True])
def test_memory_is_kept_for_what_is_late(late: bool) -> None:
    """A prober that is closed does not give back memory into which NIXL may write."""
    reader, writer = Engine(), Engine()
    prober = Prober(reader, writer)
    reader.well = not late
    if late:
        with pytest.raises(DeadlineExceededError):
            prober.read("name", deadline=0.0)
    else:
        prober.read("name", deadline=0.0)
    memory = prober._memory
    prober.close()
    prober.close()
    assert not reader.registered
    assert not writer.registered
    assert any(kept is memory for kept in objects_probe._kept) == late


def test_a_read_begins_with_zeros() -> None:
    """A short object leaves what was there before, so there is nothing."""
    engine = Engine()
    engine.well = True
    prober = Prober(engine, Engine())
    prober._view[:] = 255
    assert prober.read("name", deadline=0.0) == bytes(NBYTES)
