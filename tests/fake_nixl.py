"""A stand-in for NIXL's agent that moves bytes when, and as badly, as a test wants.

It is put under a real `TransferEngine`, and notes what a transfer library would suffer from:
overlapping memory, transfers released in flight, memory that nobody registered.
"""

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import numpy.typing as npt

from hicache_nixl.object_engine import ObjectEngine
from hicache_nixl.transfer import TransferEngine
from support import Bytes

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Fate:
    """What becomes of one transfer.

    `end`: "done", "raise" (from the check), "err" (the value), "refuse" (from the start), or "hang"
    (until `FakeAgent.let_go`, then done). `delay`: seconds until it ends. `moved`: how many extents
    are moved if it ends badly. `damage`: one bit of what was moved is wrong. A read of an object
    that ends badly leaves the server's message in memory, if anything is moved.
    """

    end: str = "done"
    delay: float = 0.0
    moved: int = 0
    damage: bool = False


class BackendError(Exception):
    """As NIXL's own errors: no relation to any built-in one but Exception."""


@dataclass
class Handle:
    operation: str
    memory: Rows
    file: Rows
    fate: Fate
    ends_at: float = 0.0
    state: str = "new"  # new, flying, ended, released


@dataclass(eq=False)
class FakeAgent:
    """Files are arrays, by file descriptor. `fates` gives the fate of each transfer in turn."""

    files: dict[int, Bytes]
    fates: Callable[[], Fate]
    trouble: list[str] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released = threading.Event()

    def let_go(self) -> None:
        """Let transfers that hang end."""
        self.released.set()

    # -- what TransferEngine calls ----------------------------------------------------------------

    def get_plugin_list(self) -> list[str]:
        return ["POSIX"]

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        pass

    def get_reg_descs(self, rows: list[tuple[int, int, int, str]], kind: str) -> object:
        return rows

    def register_memory(self, descriptors: object, backends: list[str]) -> object:
        return object()

    def deregister_memory(self, handle: object, backends: list[str]) -> None:
        pass

    def get_xfer_descs(self, rows: Rows, kind: str) -> Rows:
        return rows.copy()

    def initialize_xfer(
        self, operation: str, memory: Rows, file: Rows, name: str, backends: list[str]
    ) -> Handle:
        return Handle(operation, memory, file, self.fates())

    def transfer(self, handle: Handle) -> str:
        if handle.fate.end == "refuse":
            handle.state = "ended"
            raise BackendError("NIXL_ERR_NOT_ALLOWED\nrefused")
        for other in self.handles:
            if other.state == "flying" and _overlap(other.memory, handle.memory):
                self.trouble.append("two transfers in flight share memory")
        handle.state = "flying"
        handle.ends_at = time.monotonic() + handle.fate.delay
        self.handles.append(handle)
        return self._state(handle) if handle.fate.delay == 0 else "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        if handle.state != "flying":
            self.trouble.append(f"a check of a transfer that is {handle.state}")
        return self._state(handle)

    def release_xfer_handle(self, handle: Handle) -> None:
        if handle.state != "ended":
            self.trouble.append(f"a release of a transfer that is {handle.state}")
        handle.state = "released"

    def _state(self, handle: Handle) -> str:
        fate = handle.fate
        hangs = fate.end == "hang" and not self.released.is_set()
        if hangs or time.monotonic() < handle.ends_at:
            return "PROC"
        handle.state = "ended"
        good = fate.end in ("done", "hang")
        for i in range(len(handle.memory) if good else min(fate.moved, len(handle.memory))):
            self._move(handle, i)
        if good:
            return "DONE"
        if fate.end == "err":
            return "ERR"
        raise BackendError("NIXL_ERR_BACKEND")

    def _move(self, handle: Handle, i: int) -> None:
        address, nbytes, _ = (int(value) for value in handle.memory[i])
        offset, _, descriptor = (int(value) for value in handle.file[i])
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        place = self.files[descriptor][offset : offset + nbytes]
        source, target = (memory, place) if handle.operation == "WRITE" else (place, memory)
        target[:] = source
        if handle.fate.damage and i == 0:
            target[nbytes // 2] ^= 4


def _overlap(one: Rows, other: Rows) -> bool:
    starts, ends = one[:, 0], one[:, 0] + one[:, 1]
    return any(
        ((starts < address + nbytes) & (ends > address)).any() for address, nbytes, _ in other
    )


@contextmanager
def fake_engine(
    files: dict[int, Bytes], fates: Callable[[], Fate]
) -> Iterator[tuple[TransferEngine, FakeAgent]]:
    """A real engine over a `FakeAgent`; at the end all transfers are let go and must end."""
    agent = FakeAgent(files, fates)
    with mock.patch("nixl._api.nixl_agent", return_value=agent):
        engine = TransferEngine("POSIX", {})
    try:
        yield engine, agent
    finally:
        agent.let_go()
        drained = engine.drain(wait_s=30)
        engine.close()
    assert drained, "transfers are left in flight"
    assert not agent.trouble, agent.trouble


ERROR_BODY = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchKey</Code></Error>'


@dataclass
class FakeBucket:
    """Objects by name, behind as many agents as are made. `fates` gives those of the next transfers
    of an object; all others are done at once, or fail if the object is not there."""

    objects: dict[str, bytes] = field(default_factory=dict)
    fates: dict[str, list[Fate]] = field(default_factory=dict)
    refuses: bool = False
    """No more agents can be made."""
    trouble: list[str] = field(default_factory=list)
    made: list[dict[str, str]] = field(default_factory=list)
    """The parameters of each agent."""
    asked: list[str] = field(default_factory=list)
    """The object of each transfer."""
    agents: "weakref.WeakSet[FakeObjectAgent]" = field(default_factory=weakref.WeakSet)
    flying: list[Handle] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def agent(self, *_: object) -> "FakeObjectAgent":
        agent = FakeObjectAgent({}, Fate, bucket=self)
        agent.released = self.released
        self.agents.add(agent)
        return agent

    def let_go(self) -> None:
        """Let transfers that hang end, now and later."""
        self.released.set()


@dataclass(eq=False)
class FakeObjectAgent(FakeAgent):
    """An agent of NIXL's OBJ plug-in."""

    bucket: FakeBucket = field(default_factory=FakeBucket)
    names: dict[int, str] = field(default_factory=dict)
    """Of the objects that are registered."""

    def __del__(self) -> None:
        if any(handle.state == "flying" for handle in self.handles):
            self.bucket.trouble.append("an agent is destroyed with transfers in flight")

    def get_plugin_list(self) -> list[str]:
        return ["OBJ", "AZURE_BLOB"]

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        if self.bucket.refuses:
            raise BackendError("NIXL_ERR_BACKEND")
        self.bucket.made.append(dict(parameters))

    def register_memory(self, descriptors: object, backends: list[str]) -> object:
        for _, _, device, name in descriptors:  # type: ignore[attr-defined]
            if name:
                if any(device in agent.names for agent in self.bucket.agents):
                    self.bucket.trouble.append("two objects with one id")
                self.names[device] = name
        return descriptors

    def deregister_memory(self, handle: object, backends: list[str]) -> None:
        devices = {device for _, _, device, _ in handle}  # type: ignore[attr-defined]
        for flying in self.handles:
            if flying.state == "flying" and int(flying.file[0, 2]) in devices - {0}:
                self.bucket.trouble.append("an object is deregistered in flight")
        for device in devices - {0}:
            del self.names[device]

    def initialize_xfer(
        self, operation: str, memory: Rows, file: Rows, name: str, backends: list[str]
    ) -> Handle:
        object_name = self.names[int(file[0, 2])]
        self.bucket.asked.append(object_name)
        fates = self.bucket.fates.get(object_name)
        return Handle(operation, memory, file, fates.pop(0) if fates else Fate())

    def transfer(self, handle: Handle) -> str:
        for other in self.bucket.flying:
            if other.state == "flying" and _overlap(other.memory, handle.memory):
                self.bucket.trouble.append("two transfers in flight share memory")
        self.bucket.flying.append(handle)
        return super().transfer(handle)

    def _state(self, handle: Handle) -> str:
        state = super()._state(handle)
        missing = self.names.get(int(handle.file[0, 2])) not in self.bucket.objects
        if state == "DONE" and missing:
            self._fill(handle, ERROR_BODY)
            raise BackendError("NIXL_ERR_BACKEND")
        return state

    def _move(self, handle: Handle, i: int) -> None:
        name = self.names[int(handle.file[i, 2])]
        if handle.operation == "WRITE":
            address, nbytes, _ = (int(value) for value in handle.memory[i])
            self.bucket.objects[name] = ctypes.string_at(address, nbytes)
        elif handle.fate.end in ("done", "hang"):
            self._fill(handle, self.bucket.objects.get(name, b""), handle.fate.damage)
        else:
            self._fill(handle, ERROR_BODY)

    def _fill(self, handle: Handle, content: bytes, damage: bool = False) -> None:
        """What is shorter than asked for leaves the rest of the memory as it is."""
        address, nbytes, _ = (int(value) for value in handle.memory[0])
        content = content[:nbytes]
        if damage and content:
            content = bytes([content[0] ^ 4]) + content[1:]
        ctypes.memmove(address, content, len(content))


@contextmanager
def fake_object_engine(
    bucket: FakeBucket, parameters: dict[str, str] | None = None
) -> Iterator[ObjectEngine]:
    """A real engine over fake agents; at the end all transfers are let go, must end, and all agents
    be destroyed."""
    with mock.patch("nixl._api.nixl_agent", side_effect=bucket.agent):
        engine = ObjectEngine("OBJ", parameters or {})
        try:
            yield engine
        finally:
            bucket.let_go()
            drained = engine.drain(wait_s=30)
            engine.close()
    assert drained, "transfers are left in flight"
    assert not bucket.trouble, bucket.trouble
