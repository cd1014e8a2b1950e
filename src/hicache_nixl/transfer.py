"""NIXL: agents, plug-ins, registrations and transfers. The only module that imports nixl.

A `TransferEngine` is one NIXL agent with one plug-in. It moves bytes between registered host memory
and registered files; what a page is, it does not know. Reading and writing each have an engine of
their own, so that a backup never waits in the queue of a prefetch.

Facts about NIXL 1.5 that shape this module (seen on its POSIX plug-in):
- an error is raised by `check_xfer_state`; the value "ERR" exists in the API as well;
- one bad descriptor fails its whole transfer, although others may have been moved; the error is
  reported only after the rest was cancelled or has ended, so a failed transfer touches nothing;
- extents are submitted and completed only inside `transfer` and `check_xfer_state`, at most 64 in
  each call; the calls of one transfer serve the others of its agent, too;
- with `use_posix_aio`, every transfer after a failed one fails too, so that queue is not offered;
- the memory side's length is not looked at: the file side's is what is moved;
- more extents in flight than its pool holds are refused after some of them were queued;
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
"""Shape (n, 3): address or file offset, bytes, device id (0 for memory, or a file descriptor)."""

_EXTENTS_PER_POLL = 64
_EXTENTS_IN_FLIGHT = 65536
_SHORT_WAIT_S = 20e-6
_LONG_WAIT_S = 300e-6
_LATE_WAIT_S = 20e-3
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

    def __init__(self, engine: "TransferEngine", handle: Any, extents: int) -> None:
        self._engine = engine
        self._handle = handle  # None once the transfer has ended
        self._extents = extents
        self._error: TransferError | None = None
        self.done = False

    def poll(self) -> bool:
        """Make progress; True when the transfer has ended well. Never blocks.

        Raises TransferError when it has ended badly, again at each later call.
        """
        if self._handle is not None:
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
        polls_needed = self._extents // _EXTENTS_PER_POLL
        polls = 0
        while not self.poll():
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"a transfer of {self._extents} extents did not end by its deadline"
                )
            time.sleep(pause)
            polls += 1
            if polls > polls_needed:
                pause = min(pause * 1.5, _LONG_WAIT_S)

    def abandon(self, on_end: Callable[[], None]) -> None:
        """Hand the transfer to the engine, which calls `on_end` once it has ended, well or badly.

        Until then neither its memory nor its place on the medium may serve anything else. `on_end`
        runs on a thread of the engine, which lives as long as there are late transfers; it may use
        the engine, and what it raises is logged.
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
        self._extents_in_flight = 0
        self._late: list[tuple[Transfer, Callable[[], None]]] = []
        self._watcher: threading.Thread | None = None
        self._memory: list[tuple[int, int]] = []  # (start, end), by start
        self._files: dict[int, int] = {}  # descriptor -> bytes
        self._closed = False
        self._name = f"hicache-nixl-{uuid.uuid4()}"
        config = nixl_agent_config(
            backends=[],
            enable_prog_thread=False,
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE,  # self._lock does it
        )
        named = f" with {', '.join(sorted(parameters))}" if parameters else ""
        with _as_transfer_error(f"NIXL plug-in {plugin}{named} cannot start"):
            self._agent: Any = nixl_agent(self._name, config)
            if plugin not in self._agent.get_plugin_list():
                raise TransferError(
                    f"NIXL has no plug-in {plugin!r}; it has {self._agent.get_plugin_list()}"
                )
            self._agent.create_backend(plugin, parameters)

    # -- registrations ------------------------------------------------------------------------

    def register_memory(self, address: int, nbytes: int) -> Registration:
        """Let transfers touch `nbytes` of host memory at `address`.

        TransferError if some of it is registered already: NIXL would find neither.
        """
        what = f"memory {address:#x}+{nbytes}"
        with self._lock, _as_transfer_error(f"{what} cannot be registered"):
            if any(address < end and start < address + nbytes for start, end in self._memory):
                raise TransferError(f"{what} overlaps memory that is registered already")
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
            if registration.kind == "FILE":
                del self._files[registration.start]
            else:
                self._memory.remove((registration.start, registration.start + registration.nbytes))
            with _as_transfer_error(f"a {registration.kind} registration cannot be ended"):
                self._agent.deregister_memory(handle, backends=[self.plugin])

    # -- transfers ----------------------------------------------------------------------------

    def post(self, operation: Operation, memory: Descriptors, file: Descriptors) -> Transfer:
        """Start moving memory[i] to file[i] (WRITE) or back (READ). Returns at once.

        Raises TransferError when an extent lies outside of every live registration, or when the
        plug-in refuses.
        """
        extents = len(memory)
        with self._lock, _as_transfer_error(f"a {operation} of {extents} extents failed"):
            if self._closed:
                raise TransferError("the transfer engine is closed")
            if self._extents_in_flight + extents > _EXTENTS_IN_FLIGHT:
                raise TransferError(
                    f"{self._extents_in_flight} extents are in flight; {extents} more would be "
                    f"above the limit of {_EXTENTS_IN_FLIGHT}"
                )
            self._check_registered(memory, file)
            handle = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(memory, "DRAM"),
                self._agent.get_xfer_descs(file, "FILE"),
                self._name,
                backends=[self.plugin],
            )
            transfer = Transfer(self, handle, extents)
            self._extents_in_flight += extents
            self._settle(transfer, self._agent.transfer)
            for _ in range((extents - 1) // _EXTENTS_PER_POLL):  # submit the rest, too
                if transfer._handle is not None:
                    self._settle(transfer, self._agent.check_xfer_state)
        if transfer._error is not None:
            raise transfer._error
        return transfer

    def drain(self, *, wait_s: float = _CLOSE_WAIT_S) -> bool:
        """Take no more transfers and wait up to `wait_s` seconds for those in flight; True if
        none is left. Idempotent."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
        while not (idle := self._idle()) and time.monotonic() < deadline:
            time.sleep(_LONG_WAIT_S)
        return idle

    def close(self) -> None:
        """Release the NIXL agent, if no transfer is in flight. Deregister first. Idempotent."""
        if self.drain(wait_s=0):
            with self._lock:
                self._agent = None

    @property
    def late_transfers(self) -> int:
        """Abandoned transfers that have not ended yet."""
        return len(self._late)

    def _idle(self) -> bool:
        with self._lock:
            return self._extents_in_flight == 0 and not self._late

    def _check_registered(self, memory: Descriptors, file: Descriptors) -> None:
        if memory.shape != file.shape or (memory[:, 1] != file[:, 1]).any():
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
        offset, nbytes = file[:, 0], file[:, 1]
        known, which = np.unique(file[:, 2], return_inverse=True)
        limits = np.array([self._files.get(d, 0) for d in known.tolist()], np.uint64)[which]
        outside = (offset > limits) | (nbytes > limits - offset)
        if outside.any():
            first = int(outside.argmax())
            raise TransferError(
                f"file descriptor {file[first, 2]} is registered for {limits[first]} bytes, not "
                f"for {nbytes[first]} at offset {offset[first]}"
            )

    def _settle(self, transfer: Transfer, call: Callable[[Any], str]) -> None:
        """Run a NIXL call that reports a transfer's state; the lock is held."""
        handle = transfer._handle
        try:
            state = call(handle)
            if state == "ERR":
                raise TransferError("NIXL reports ERR")
            transfer.done = state == "DONE"
        except Exception as error:  # noqa: BLE001 - NIXL raises its own types, all meaning "failed"
            transfer._error = TransferError(f"the transfer failed: {_one_line(error)}")
        if transfer.done or transfer._error is not None:
            transfer._handle = None
            self._extents_in_flight -= transfer._extents
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:  # noqa: BLE001 - it has ended, whatever NIXL says of it
                logger.warning("a NIXL transfer handle is not released: %s", _one_line(error))

    def _poll(self, transfer: Transfer) -> None:
        with self._lock:
            if transfer._handle is not None:
                self._settle(transfer, self._agent.check_xfer_state)

    def _abandon(self, transfer: Transfer, on_end: Callable[[], None]) -> None:
        logger.warning(
            "a transfer of %d extents is late; its buffers stay reserved until it ends",
            transfer._extents,
        )
        with self._lock:
            self._late.append((transfer, on_end))
            if self._watcher is None:
                watcher = threading.Thread(
                    target=self._watch_late, name="hicache-nixl-late", daemon=True
                )
                watcher.start()
                self._watcher = watcher

    def _watch_late(self) -> None:
        pause = _SHORT_WAIT_S
        while True:
            with self._lock:
                for transfer, _ in self._late:
                    if transfer._handle is not None:
                        self._settle(transfer, self._agent.check_xfer_state)
                ended = [late for late in self._late if late[0]._handle is None]
            for _, on_end in ended:
                try:
                    on_end()
                except Exception:
                    logger.exception("what waited for the end of a late transfer failed")
            with self._lock:
                self._late = [late for late in self._late if late not in ended]
                if not self._late:
                    self._watcher = None
                    return
            time.sleep(pause)
            pause = min(pause * 1.5, _LATE_WAIT_S)


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
