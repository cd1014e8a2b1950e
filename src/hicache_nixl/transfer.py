"""NIXL: agents, plug-ins, registrations and transfers. The only module that imports nixl.

A `TransferEngine` is one NIXL agent with one plug-in. It moves bytes between registered host memory
and registered files or objects; what a page is, it does not know. Reading and writing each have an
engine of their own, so that a backup never waits in the queue of a prefetch.

Facts about NIXL 1.5 that shape this module, seen on its POSIX plug-in:
- an error is raised by `check_xfer_state`; the value "ERR" exists in the API as well;
- one bad descriptor fails its whole transfer, although others may have been moved; the error is
  reported only after the rest was cancelled or has ended, so a failed transfer touches nothing;
- extents are submitted and completed only inside `transfer` and `check_xfer_state`, at most 64 in
  each call; the calls of one transfer serve the others of its agent, too;
- with `use_posix_aio`, every transfer after a failed one fails too, so that queue is not offered;
- the memory side's length is not looked at: the file side's is what is moved;
- more extents in flight than its pool holds are refused after some of them were queued;
- a released transfer may still be in the kernel: nothing here is released before it has ended.
Seen on OBJ:
- one error fails a whole transfer, so each object has a transfer of its own;
- a check tells of the end, well or badly, after the last byte was written, and holds nothing up;
- releasing a transfer in flight, or destroying an agent that has some, blocks for seconds, the
  latter with the GIL held, and memory is written afterwards all the same.
"""

import atexit
import contextlib
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from hicache_nixl.errors import DeadlineExceededError, TransferError
from hicache_nixl.registrations import Descriptors, Registration, Registrations

logger = logging.getLogger(__name__)

Operation = Literal["READ", "WRITE"]

OBJECT_PLUGINS = ("OBJ", "AZURE_BLOB")
"""Plug-ins that move objects; all others move files."""

_EXTENTS_PER_POLL = 64
_EXTENTS_IN_FLIGHT = 65536
_SHORT_WAIT_S = 20e-6
_LONG_WAIT_S = 300e-6
_LATE_WAIT_S = 20e-3
CLOSE_WAIT_S = 5.0
"""How long `drain` waits if it is not told."""

_object_ids = itertools.count(1)  # device ids of objects, unique in the process

QUEUE_PARAMETERS: dict[str, dict[str, str]] = {
    "uring": {"use_uring": "true"},
    "aio": {"use_aio": "true"},
}


def quiet_nixl() -> None:
    """Keep NIXL's own log lines, which go to standard output, to warnings and errors."""
    with contextlib.suppress(ImportError):
        import nixl._api  # noqa: F401 - importing it sets its logger up
    logging.getLogger("nixl").setLevel(logging.WARNING)


class Transfer:
    """One posted transfer. Belongs to the thread that posted it until it is abandoned."""

    def __init__(self, engine: "TransferEngine", handle: Any, extents: int) -> None:
        self._engine = engine
        self._handle = handle  # None once the transfer has ended
        self._extents = extents
        self.error: TransferError | None = None
        """Why it has ended badly, if it has."""
        self.done = False
        """Whether it has ended well."""

    @property
    def late(self) -> bool:
        """Whether it has not ended, as of the last poll."""
        return self._handle is not None

    def poll(self) -> bool:
        """Make progress; True when the transfer has ended well. Never blocks.

        Raises TransferError when it has ended badly, again at each later call.
        """
        if self._handle is not None:
            self._engine._poll(self)
        if self.error is not None:
            raise self.error
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
        self._engine.abandon([self], on_end)


class TransferEngine:
    """One NIXL agent with one plug-in.

    Safe for threads: NIXL calls are serialized, waiting is not. Registration is meant to be rare
    (once per file and host pool, once for many objects); transfers refer to it.

    Args:
        plugin: NIXL's name of it, such as "POSIX".
        parameters: what the plug-in is created with. Their values are never shown.
    """

    always_staged = False

    def __init__(self, plugin: str, parameters: dict[str, str]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise TransferError(
                f"nixl cannot be imported ({error}); install it: pip install nixl nixl-cu12"
            ) from error
        self.plugin = plugin
        self._segment = "OBJ" if plugin in OBJECT_PLUGINS else "FILE"
        self._lock = threading.RLock()
        self._extents_in_flight = 0
        self._late: list[tuple[Sequence[Transfer], Callable[[], None]]] = []
        self._watcher: threading.Thread | None = None
        self._registrations = Registrations()
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
        _engines.add(self)

    # -- registrations ------------------------------------------------------------------------

    def register_memory(self, address: int, nbytes: int) -> Registration:
        """Let transfers touch `nbytes` of host memory at `address`.

        TransferError if some of it is registered already: NIXL would find neither.
        """
        with self._lock, _as_transfer_error(f"memory {address:#x}+{nbytes} cannot be registered"):
            self._registrations.check_free(address, nbytes)
            handle = self._register([(address, nbytes, 0, "")], "DRAM")
            return self._noted(Registration(handle, start=address, nbytes=nbytes))

    def register_file(self, descriptor: int, nbytes: int) -> Registration:
        """Let transfers touch the first `nbytes` of an open file.

        The file descriptor is the device id in transfers, and must stay open and be registered
        only once until it is deregistered.
        """
        with self._lock, _as_transfer_error(f"file descriptor {descriptor} cannot be registered"):
            self._registrations.check_unknown(descriptor)
            handle = self._register([(0, nbytes, descriptor, "")], "FILE")
            return self._noted(Registration(handle, nbytes=nbytes, devices=(descriptor,)))

    def register_objects(self, names: Sequence[str], nbytes: int) -> Registration:
        """Let transfers touch objects of `nbytes` each, whose ids are the registration's devices.
        Nothing is asked of the server."""
        devices = tuple(next(_object_ids) for _ in names)
        with self._lock, _as_transfer_error(f"{len(names)} objects cannot be registered"):
            rows = [(0, nbytes, *named) for named in zip(devices, names, strict=True)]
            handle = self._register(rows, "OBJ")
            return self._noted(Registration(handle, nbytes=nbytes, devices=devices))

    def deregister(self, registration: Registration) -> None:
        """End a registration. A second call does nothing (NIXL might free twice)."""
        with self._lock:
            handle, registration.handle = registration.handle, None
            if handle is None or self._agent is None:
                return
            self._registrations.remove(registration)
            with _as_transfer_error("a registration cannot be ended"):
                self._agent.deregister_memory(handle, backends=[self.plugin])

    def _register(self, rows: list[tuple[int, int, int, str]], kind: str) -> Any:
        if self._agent is None:
            raise TransferError("the transfer engine is closed")
        descriptors = self._agent.get_reg_descs(rows, kind)
        return self._agent.register_memory(descriptors, backends=[self.plugin])

    def _noted(self, registration: Registration) -> Registration:
        self._registrations.add(registration)
        return registration

    # -- transfers ----------------------------------------------------------------------------

    def post(self, operation: Operation, memory: Descriptors, place: Descriptors) -> Transfer:
        """Start moving memory[i] to place[i] (WRITE) or back (READ). Returns at once.

        Raises TransferError when an extent lies outside of every live registration, or when the
        plug-in refuses.
        """
        extents = len(memory)
        with self._lock, _as_transfer_error(f"a {operation} of {extents} extents failed"):
            self._check(memory, place)
            transfer = self._start(operation, memory, place)
            for _ in range((extents - 1) // _EXTENTS_PER_POLL):  # submit the rest, too
                if transfer._handle is not None:
                    self._settle(transfer, self._agent.check_xfer_state)
        if transfer.error is not None:
            raise transfer.error
        return transfer

    def post_each(
        self, operation: Operation, memory: Descriptors, place: Descriptors
    ) -> list[Transfer]:
        """As `post`, with a transfer for each extent. What the plug-in refuses has ended badly.

        Raises TransferError, with nothing started, when an extent lies outside of every live
        registration.
        """
        with self._lock:
            self._check(memory, place)
        transfers = []
        for row in range(len(memory)):
            one = slice(row, row + 1)
            with self._lock:  # not for all of them: others poll meanwhile
                try:
                    transfers.append(self._start(operation, memory[one], place[one]))
                except Exception as error:  # noqa: BLE001 - as in `_settle`
                    transfers.append(failed := Transfer(self, None, 1))
                    failed.error = TransferError(f"the transfer failed: {_one_line(error)}")
        return transfers

    def _check(self, memory: Descriptors, place: Descriptors) -> None:
        """TransferError if these extents cannot be posted; the lock is held."""
        if self._closed:
            raise TransferError("the transfer engine is closed")
        if self._extents_in_flight + len(memory) > _EXTENTS_IN_FLIGHT:
            raise TransferError(
                f"{self._extents_in_flight} extents are in flight; {len(memory)} more would be "
                f"above the limit of {_EXTENTS_IN_FLIGHT}"
            )
        self._registrations.check(memory, place)

    def _start(self, operation: Operation, memory: Descriptors, place: Descriptors) -> Transfer:
        """Post what was checked; the lock is held."""
        handle = self._agent.initialize_xfer(
            operation,
            self._agent.get_xfer_descs(memory, "DRAM"),
            self._agent.get_xfer_descs(place, self._segment),
            self._name,
            backends=[self.plugin],
        )
        transfer = Transfer(self, handle, len(memory))
        self._extents_in_flight += len(memory)
        self._settle(transfer, self._agent.transfer)
        return transfer

    def drain(self, *, wait_s: float = CLOSE_WAIT_S) -> bool:
        """Take no more transfers and wait up to `wait_s` seconds for those in flight; True if
        none is left. Idempotent."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
        while not (idle := self.is_idle) and time.monotonic() < deadline:
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
        return sum(len(transfers) for transfers, _ in self._late)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is in flight, and nothing waits for the end of one."""
        with self._lock:
            return self._extents_in_flight == 0 and not self._late

    def _settle(self, transfer: Transfer, call: Callable[[Any], str]) -> None:
        """Run a NIXL call that reports a transfer's state; the lock is held."""
        handle = transfer._handle
        try:
            state = call(handle)
            if state == "ERR":
                raise TransferError("NIXL reports ERR")
            transfer.done = state == "DONE"
        except Exception as error:  # noqa: BLE001 - NIXL raises its own types, all meaning "failed"
            transfer.error = TransferError(f"the transfer failed: {_one_line(error)}")
        if transfer.done or transfer.error is not None:
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

    def abandon(self, transfers: Sequence[Transfer], on_end: Callable[[], None]) -> None:
        """As `Transfer.abandon`, for several: `on_end` is called when all have ended."""
        logger.warning(
            "%d extents are late; their buffers stay reserved until they end",
            sum(transfer._extents for transfer in transfers if transfer.late),
        )
        with self._lock:
            self._late.append((transfers, on_end))
            if self._watcher is None:
                watcher = threading.Thread(
                    target=self._watch_late, name="hicache-nixl-late", daemon=True
                )
                watcher.start()
                self._watcher = watcher

    def _watch_late(self) -> None:
        pause = _SHORT_WAIT_S
        while True:
            for transfers, _ in self._late:
                for transfer in transfers:
                    self._poll(transfer)
            with self._lock:
                ended = [late for late in self._late if not any(t.late for t in late[0])]
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


_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


@atexit.register
def _keep_threads_out() -> None:
    """A daemon thread inside of NIXL when the interpreter ends would abort the process. From here
    on only the thread that ends it gets in."""
    for engine in list(_engines):
        engine._lock.acquire()


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
