"""What an engine may touch, and which extents lie inside of it."""

import numpy as np
import pytest

from hicache_nixl.errors import TransferError
from hicache_nixl.registrations import Descriptors, Registration, Registrations


def rows(*extents: tuple[int, int, int]) -> Descriptors:
    return np.array(extents, np.uint64).reshape(-1, 3)


@pytest.fixture
def known() -> Registrations:
    """Memory 1000 to 1999, and two objects of 500 bytes each."""
    known = Registrations()
    known.add(Registration(None, start=1000, nbytes=1000))
    known.add(Registration(None, nbytes=500, devices=(7, 9)))
    return known


@pytest.mark.parametrize(
    ("memory", "place"),
    [
        ((1000, 500, 0), (0, 500, 7)),
        ((1500, 500, 0), (0, 500, 9)),
        ((1999, 1, 0), (499, 1, 9)),
        ((1000, 0, 0), (0, 0, 8)),
    ],
)
def test_what_lies_inside_is_let_through(
    known: Registrations, memory: tuple[int, int, int], place: tuple[int, int, int]
) -> None:
    """Up to the last byte of a registration."""
    known.check(rows(memory), rows(place))


@pytest.mark.parametrize(
    ("memory", "place", "message"),
    [
        ((999, 10, 0), (0, 10, 7), "memory 0x3e7.10 lies in no registration"),
        ((1991, 10, 0), (0, 10, 7), "memory 0x7c7.10 lies in no registration"),
        ((2**64 - 1, 10, 0), (0, 10, 7), "lies in no registration"),
        ((1000, 2**64 - 1, 0), (0, 2**64 - 1, 7), "lies in no registration"),
        ((1000, 10, 0), (491, 10, 7), "7 is registered for 500 bytes, not for 10 at offset 491"),
        ((1000, 10, 0), (0, 10, 8), "8 is registered for 0 bytes"),
        ((1000, 10, 0), (0, 11, 7), "differ in number or length"),
    ],
)
def test_what_lies_outside_is_refused(
    known: Registrations,
    memory: tuple[int, int, int],
    place: tuple[int, int, int],
    message: str,
) -> None:
    """By a byte or by far; also beside an extent that is fine."""
    with pytest.raises(TransferError, match=message):
        known.check(rows(memory), rows(place))
    with pytest.raises(TransferError, match=message):
        known.check(rows((1000, 1, 0), memory), rows((0, 1, 7), place))


def test_what_ended_is_forgotten(known: Registrations) -> None:
    """All objects of a registration go with it, and memory can be registered anew."""
    objects = Registration(None, nbytes=100, devices=(20, 21))
    known.add(objects)
    known.check(rows((1000, 100, 0)), rows((0, 100, 21)))
    known.remove(objects)
    with pytest.raises(TransferError, match="21 is registered for 0 bytes"):
        known.check(rows((1000, 100, 0)), rows((0, 100, 21)))
    with pytest.raises(TransferError, match="overlaps"):
        known.check_free(1999, 10)
    with pytest.raises(TransferError, match="file descriptor 7 is registered already"):
        known.check_unknown(7)
    known.remove(Registration(None, start=1000, nbytes=1000))
    known.check_free(1999, 10)
    known.check_unknown(21)
