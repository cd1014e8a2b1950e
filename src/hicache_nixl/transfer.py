"""NIXL: agents, plug-ins, registrations and transfers. The only module that imports nixl.

A `TransferEngine` is one NIXL agent with one plug-in. It moves bytes between registered host memory
and registered files; what a page is, it does not know. Reading and writing each have an engine of
their own, so that a backup never waits in the queue of a prefetch.

Facts about NIXL 1.5 that shape this module (seen on its POSIX plug-in):
- an error is raised by `check_xfer_state`; the value "ERR" exists in the API as well;
- one bad descriptor fails its whole transfer, although others may have been moved;
- progress is made only inside `check_xfer_state`, at most 64 completions a call;
- with `use_posix_aio`, every transfer after a failed one fails too, so that queue is not offered;
- a released transfer may still be in the kernel: nothing here is released before it has ended.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hicache_nixl.errors import DeadlineExceededError, TransferError

logger = logging.getLogger(__name__)

Operation = Literal["READ", "WRITE"]
Descriptors = npt.NDArray[np.uint64]
"""Shape (n, 3): address or file offset, bytes, device id (0 for memory, else the file descriptor)."""

_COMPLETIONS_PER_POLL = 64
_SHORT_WAIT_S = 20e-6
_LONG_WAIT_S = 300e-6
_CLOSE_WAIT_S = 5.0

QUEUE_PARAMETERS: dict[str, dict[str, str]] = {
    "uring": {"use_uring": "true"},
    "aio": {"use_aio": "true"},
}


def quiet_nixl() -> None:
    """Keep NIXL's own log lines, which go to standard output, to warnings and errors."""
    with contextlib.suppress(ImportError):
        import nixl._api  # noqa: F401 - importing it sets its logger up
    logging.getLogger("nixl").setLevel(logging.WARNING)


class Registration:
    """Memory or a file that an engine may touch. Ends with `TransferEngine.deregister`."""

    def __init__(self, handle: Any, kind: str, start: int, nbytes: int) -> None:
        self.handle = handle
        self.kind = kind
        self.start = start
        self.nbytes = nbytes


class Transfer:
    """One posted transfer. Belongs to the thread that posted it until it is abandoned."""

    def __init__(self, engine: "TransferEngine", handle: Any, descriptors: int) -> None:
        self._engine = engine
        self._handle = handle
        self._descriptors = descriptors
        self._error: TransferError | None = None
        self.done = False

    def poll(self) -> bool:
        """Make progress; True when the transfer has ended well. Never blocks.

        Raises TransferError when it has ended badly, again at each later call.
        """
        if self._error is not None:
            raise self._error
        if not self.done:
            self._engine._poll(self)
            if self._error is not None:
                raise self._error
        return self.done

    def wait(self, deadline: float) -> None:
        """Block until the transfer has ended, at most until `deadline` (`time.monotonic`).

        Raises TransferError, or DeadlineExceededError with the transfer still in flight: then
        either wait again or `abandon` it.
        """
        pause = _SHORT_WAIT_S
        polls_needed = self._descriptors // _COMPLETIONS_PER_POLL
        polls = 0
        while not self.poll():
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"a transfer of {self._descriptors} extents did not end by its deadline"
                )
            time.sleep(pause)
            polls += 1
            if polls > polls_needed:
                pause = min(pause * 1.5, _LONG_WAIT_S)

    def abandon(self, on_end: Callable[[], None]) -> None:
        """Hand the transfer to the engine, which calls `on_end` once it has ended, well or badly.

        Until then neither its memory nor its place on the medium may serve anything else.
        """
        self._engine._abandon(self, on_end)


class TransferEngine:
    """One NIXL agent with one plug-in.

    Safe for threads: NIXL calls are serialized, waiting is not. Registration is meant to be rare
    (once per file and host pool); transfers refer to it.

    Args:
        plugin: NIXL's name of it, such as "POSIX".
        parameters: what the plug-in is created with.
    """

    def __init__(self, plugin: str, parameters: dict[str, str]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise TransferError(
                f"nixl cannot be imported ({error}); install it: pip install nixl nixl-cu12"
            ) from error
        self.plugin = plugin
        self._lock = threading.Lock()
        self._late: list[tuple[Transfer, Callable[[], None]]] = []
        self._memory: list[tuple[int, int]] = []  # (start, end), by start
        self._files: dict[int, int] = {}  # descriptor -> bytes
        self._closed = False
        self._name = f"hicache-nixl-{uuid.uuid4()}"
        config = nixl_agent_config(
            backends=[],
            enable_prog_thread=False,
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE,  # self._lock does it
        )
        with _as_transfer_error(f"NIXL plug-in {plugin} with {sorted(parameters)} cannot start"):
            self._agent: Any = nixl_agent(self._name, config)
            if plugin not in self._agent.get_plugin_list():
                raise TransferError(
                    f"NIXL has no plug-in {plugin!r}; it has {self._agent.get_plugin_list()}"
                )
            self._agent.create_backend(plugin, parameters)

    # -- registrations ------------------------------------------------------------------------

    def register_memory(self, address: int, nbytes: int) -> Registration:
        """Let transfers touch `nbytes` of host memory at `address`."""
        with self._lock, _as_transfer_error(f"{nbytes} bytes of memory cannot be registered"):
            descriptors = self._agent.get_reg_descs([(address, nbytes, 0, "")], "DRAM")
            handle = self._agent.register_memory(descriptors, backends=[self.plugin])
            self._memory = sorted([*self._memory, (address, address + nbytes)])
        return Registration(handle, "DRAM", address, nbytes)

    def register_file(self, descriptor: int, nbytes: int) -> Registration:
        """Let transfers touch the first `nbytes` of an open file.

        The file descriptor is the device id in transfers, and must stay open and be registered
        only once until it is deregistered.
        """
        with self._lock, _as_transfer_error(f"file descriptor {descriptor} cannot be registered"):
            if descriptor in self._files:
                raise TransferError(f"file descriptor {descriptor} is registered already")
            descriptors = self._agent.get_reg_descs([(0, nbytes, descriptor, "")], "FILE")
            handle = self._agent.register_memory(descriptors, backends=[self.plugin])
            self._files[descriptor] = nbytes
        return Registration(handle, "FILE", descriptor, nbytes)

    def deregister(self, registration: Registration) -> None:
        """End a registration. A second call does nothing (NIXL might free twice)."""
        with self._lock:
            handle, registration.handle = registration.handle, None
            if handle is None or self._agent is None:
                return
            with _as_transfer_error(f"a {registration.kind} registration cannot be ended"):
                self._agent.deregister_memory(handle, backends=[self.plugin])
            if registration.kind == "FILE":
                self._files.pop(registration.start, None)
            else:
                self._memory.remove((registration.start, registration.start + registration.nbytes))

    # -- transfers ----------------------------------------------------------------------------

    def post(self, operation: Operation, memory: Descriptors, file: Descriptors) -> Transfer:
        """Start moving memory[i] to file[i] (WRITE) or back (READ). Returns at once.

        Raises TransferError when an extent lies outside of every live registration, or when the
        plug-in refuses.
        """
        self._reap()
        with self._lock, _as_transfer_error(f"a {operation} of {len(memory)} extents failed"):
            if self._closed:
                raise TransferError("the transfer engine is closed")
            self._check_registered(memory, file)
            handle = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(memory, "DRAM"),
                self._agent.get_xfer_descs(file, "FILE"),
                self._name,
                backends=[self.plugin],
            )
            transfer = Transfer(self, handle, len(memory))
            self._settle(transfer, lambda: self._agent.transfer(handle))
        if transfer._error is not None:
            raise transfer._error
        return transfer

    def drain(self, *, wait_s: float = _CLOSE_WAIT_S) -> bool:
        """Take no more transfers and wait up to `wait_s` seconds for late ones; True if none is
        left. Idempotent."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
        while self._late and time.monotonic() < deadline:
            self._reap()
            time.sleep(_LONG_WAIT_S)
        return not self._late

    def close(self) -> None:
        """Release the NIXL agent, if no transfer is late. Deregister first. Idempotent."""
        if self.drain(wait_s=0):
            with self._lock:
                self._agent = None

    @property
    def late_transfers(self) -> int:
        """Abandoned transfers that have not ended yet."""
        return len(self._late)

    def _check_registered(self, memory: Descriptors, file: Descriptors) -> None:
        starts = np.fromiter((start for start, _ in self._memory), np.uint64)
        ends = np.fromiter((end for _, end in self._memory), np.uint64)
        region = np.searchsorted(starts, memory[:, 0], side="right").astype(np.int64) - 1
        outside = (region < 0) | (memory[:, 0] + memory[:, 1] > ends[np.maximum(region, 0)])
        if len(ends) == 0 or outside.any():
            address, nbytes, _ = memory[int(outside.argmax())]
            raise TransferError(f"memory {address:#x}+{nbytes} lies in no registration")
        for descriptor in np.unique(file[:, 2]):
            rows = file[file[:, 2] == descriptor]
            limit = self._files.get(int(descriptor), -1)
            if int((rows[:, 0] + rows[:, 1]).max()) > limit:
                raise TransferError(
                    f"file descriptor {descriptor} is registered for {max(limit, 0)} bytes, not "
                    f"for {int((rows[:, 0] + rows[:, 1]).max())}"
                )

    def _settle(self, transfer: Transfer, call: Callable[[], str]) -> None:
        """Run a NIXL call that reports a transfer's state; the lock is held."""
        try:
            state = call()
            if state == "ERR":
                raise TransferError("NIXL reports ERR")
            transfer.done = state == "DONE"
        except Exception as error:  # noqa: BLE001 - NIXL raises its own types, all meaning "failed"
            transfer._error = TransferError(f"the transfer failed: {_one_line(error)}")
        if transfer.done or transfer._error is not None:
            with _as_transfer_error("a transfer handle cannot be released"):
                self._agent.release_xfer_handle(transfer._handle)
            transfer._handle = None

    def _poll(self, transfer: Transfer) -> None:
        with self._lock:
            if transfer._handle is not None:
                self._settle(transfer, lambda: self._agent.check_xfer_state(transfer._handle))

    def _abandon(self, transfer: Transfer, on_end: Callable[[], None]) -> None:
        with self._lock:
            self._late.append((transfer, on_end))
        logger.warning(
            "a transfer of %d extents is late; its buffers stay reserved until it ends",
            transfer._descriptors,
        )

    def _reap(self) -> None:
        if not self._late:
            return
        ended: list[Callable[[], None]] = []
        with self._lock:
            still_late = []
            for transfer, on_end in self._late:
                if transfer._handle is not None:
                    handle = transfer._handle
                    self._settle(transfer, lambda h=handle: self._agent.check_xfer_state(h))  # type: ignore[misc]
                if transfer._handle is None:
                    ended.append(on_end)
                else:
                    still_late.append((transfer, on_end))
            self._late = still_late
        for on_end in ended:
            on_end()


@contextmanager
def _as_transfer_error(what: str) -> Iterator[None]:
    """NIXL raises types of its own; outside of this module they are all TransferError."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"{what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())}".strip()
