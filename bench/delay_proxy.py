"""`python -m bench.delay_proxy LISTEN TARGET MS`: a TCP proxy that makes a network out of loopback.

Each direction holds its bytes for half of MS milliseconds and reorders nothing, so a round trip
takes MS longer. It is a process of its own: its work must not take turns with the client's.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import create_connection
from typing import cast

from bench.plan import BenchError
from bench.s3_server import free_ports

_HOST = "127.0.0.1"
_START_SECONDS = 20


class _End(asyncio.Protocol):
    """One of the two connections of a client: what it receives leaves by `other`, later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[float, bytes]] = deque()
        self._waiting = False
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._hold(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._hold(b"")

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def release(self) -> None:
        """Send on what has been held long enough. An empty piece ends the other connection."""
        self._waiting = False
        target = None if self.other is None else self.other.transport
        while target is not None and self._held and self._held[0][0] <= self._loop.time():
            _, data = self._held.popleft()
            if data:
                target.write(data)
            else:
                target.close()
        if target is not None and self._held:
            self._wait()

    def _hold(self, data: bytes) -> None:
        self._held.append((self._loop.time() + self._seconds, data))
        if not self._waiting:
            self._wait()

    def _wait(self) -> None:
        self._waiting = True
        self._loop.call_at(self._held[0][0], self.release)


class _Near(_End):
    """A client's own connection; connects to the target first."""

    def __init__(self, seconds: float, target: int) -> None:
        super().__init__(seconds)
        self._target = target

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        far = _End(self._seconds)
        far.other = self
        try:
            await self._loop.create_connection(lambda: far, _HOST, self._target)
        except OSError:
            if self.transport is not None:
                self.transport.abort()
            return
        self.other = far
        self.release()


async def serve(listen: int, target: int, seconds: float) -> None:
    """Listen on 127.0.0.1 until cancelled; a round trip takes `seconds` more."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Near(seconds / 2, target), _HOST, listen)
    await server.serve_forever()


@contextmanager
def delayed(target: int, seconds: float) -> Iterator[str]:
    """URL under which the server on port `target` is `seconds` of round trip away."""
    (listen,) = free_ports(1)
    arguments = [str(listen), str(target), str(seconds * 1e3)]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", __name__, *arguments],
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_until_listening(listen, process)
        yield f"http://{_HOST}:{listen}"
    finally:
        process.kill()
        process.wait()


def _wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), create_connection((_HOST, port), timeout=1):
            return
        time.sleep(0.05)
    raise BenchError("the proxy that delays the server did not start")


if __name__ == "__main__":
    _listen, _target, _milliseconds = sys.argv[1:]
    asyncio.run(serve(int(_listen), int(_target), float(_milliseconds) / 1e3))
