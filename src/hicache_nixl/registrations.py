"""What one engine may touch: registered memory, and files or objects by their device ids.

Knows which extents lie inside of a registration. It knows nothing of NIXL, which does not look.
"""

from bisect import insort
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_nixl.errors import TransferError

Descriptors = npt.NDArray[np.uint64]
"""Shape (n, 3): address or offset, bytes, device id (0 for memory, a file descriptor, or the id
of an object)."""


class Registration:
    """Memory, a file or objects that an engine may touch. Ends with the engine's `deregister`."""

    def __init__(
        self, handle: Any, *, start: int = 0, nbytes: int, devices: tuple[int, ...] = ()
    ) -> None:
        self.handle = handle  # None once it has ended
        self.start = start
        """Address of memory."""
        self.nbytes = nbytes
        """Of the memory, or of each device."""
        self.devices = devices
        """Device ids; none for memory."""


class Registrations:
    """The live ones of one engine. Not safe for threads."""

    def __init__(self) -> None:
        self._memory: list[tuple[int, int]] = []  # (start, end), by start
        self._devices: dict[int, int] = {}  # device id -> bytes

    def add(self, registration: Registration) -> None:
        """Note a registration that was `check_free`."""
        if registration.devices:
            self._devices.update(dict.fromkeys(registration.devices, registration.nbytes))
        else:
            insort(self._memory, (registration.start, registration.start + registration.nbytes))

    def remove(self, registration: Registration) -> None:
        """Forget a registration."""
        if registration.devices:
            for device in registration.devices:
                del self._devices[device]
        else:
            self._memory.remove((registration.start, registration.start + registration.nbytes))

    def check_free(self, address: int, nbytes: int) -> None:
        """TransferError if some of this memory is registered."""
        if any(address < end and start < address + nbytes for start, end in self._memory):
            raise TransferError(
                f"memory {address:#x}+{nbytes} overlaps memory that is registered already"
            )

    def check_unknown(self, descriptor: int) -> None:
        """TransferError if this file descriptor is registered."""
        if descriptor in self._devices:
            raise TransferError(f"file descriptor {descriptor} is registered already")

    def check(self, memory: Descriptors, place: Descriptors) -> None:
        """TransferError if an extent lies outside of every registration."""
        if memory.shape != place.shape or (memory[:, 1] != place[:, 1]).any():
            raise TransferError("memory and file extents differ in number or length")
        starts = np.array([start for start, _ in self._memory], np.uint64)
        ends = np.array([0, *(end for _, end in self._memory)], np.uint64)
        address, nbytes = memory[:, 0], memory[:, 1]
        limits = ends[np.searchsorted(starts, address, side="right")]
        outside = (address > limits) | (nbytes > limits - address)
        if outside.any():
            first = int(outside.argmax())
            raise TransferError(
                f"memory {int(address[first]):#x}+{nbytes[first]} lies in no registration"
            )
        offset, nbytes = place[:, 0], place[:, 1]
        known, which = np.unique(place[:, 2], return_inverse=True)
        limits = np.array(self._limits(known.tolist()), np.uint64)[which]
        outside = (offset > limits) | (nbytes > limits - offset)
        if outside.any():
            first = int(outside.argmax())
            raise TransferError(
                f"file descriptor {place[first, 2]} is registered for {limits[first]} bytes, not "
                f"for {nbytes[first]} at offset {offset[first]}"
            )

    def _limits(self, devices: Iterable[int]) -> list[int]:
        return [self._devices.get(device, 0) for device in devices]
